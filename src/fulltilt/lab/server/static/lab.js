"use strict";
// The token of the first visit is behind the #, which no server and no log sees.
const login = document.getElementById("login");
if (login && location.hash.length > 1) {
  login.elements.token.value = decodeURIComponent(location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
  login.submit();
}

document.addEventListener("click", (event) => {
  const head = event.target.closest(".sortable th");
  if (head) sort(head);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches(".sortable th")) sort(event.target);
});

function sort(head) {
  const rows = [...head.closest("table").tBodies[0].rows];
  const place = head.cellIndex, falls = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", falls ? "descending" : "ascending");
  const read = (row) => row.cells[place].dataset.value ?? row.cells[place].textContent.trim();
  rows.sort((a, b) => read(a).localeCompare(read(b), undefined, { numeric: true }) * (falls ? -1 : 1));
  rows.forEach((row) => row.parentNode.append(row));
}

document.addEventListener("change", (event) => {
  const id = event.target.dataset.priority;
  if (id) {
    fetch(`/api/experiments/${id}/priority`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ priority: Number(event.target.value) }),
    });
  }
});

// What a reader has chosen stays chosen when the figures are brought anew.
let chosen = [];
document.addEventListener("htmx:beforeSwap", () => {
  chosen = [...document.querySelectorAll("input[type=radio]:checked")].map((button) => button.id);
});
document.addEventListener("htmx:afterSwap", () => {
  for (const id of chosen) document.getElementById(id)?.click();
});

const log = document.getElementById("log");
if (log) follow(log);

async function follow(log) {
  const decoder = new TextDecoder();
  let attempt = Math.max(1, Number(log.dataset.attempt)), offset = 0;
  for (;;) {
    const answer = await fetch(`/api/experiments/${log.dataset.id}/log?attempt=${attempt}&offset=${offset}`);
    if (!answer.ok) return;
    const data = new Uint8Array(await answer.arrayBuffer());
    offset += data.length;
    if (data.length) {
      const atEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
      // Colours and moves of a terminal have no place here.
      const text = decoder.decode(data, { stream: true }).replace(/\x1b\[[0-?]*[ -/]*[@-~]/g, "");
      log.append(text);
      if (atEnd) log.scrollTop = log.scrollHeight;
      if (log.textContent.length > 2e6) log.textContent = log.textContent.slice(-1e6);
    } else {
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
}

window.addEventListener("DOMContentLoaded", () => {
  for (const head of document.querySelectorAll(".sortable th")) head.tabIndex = 0;
  const text = document.getElementById("text");
  if (text && window.CodeMirror) {
    const editor = CodeMirror.fromTextArea(text, { mode: "yaml", lineNumbers: true, extraKeys: { Tab: false, "Shift-Tab": false } });
    editor.on("change", () => editor.save());
  }
});
