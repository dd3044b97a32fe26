"use strict";
// The token of the first visit is behind the #, which no server and no log sees.
const login = document.getElementById("login");
if (login && location.hash.length > 1) {
  login.elements.token.value = decodeURIComponent(location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
  login.submit();
}

const notice = document.getElementById("notice");

function say(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

function readError(text) {
  try {
    const { error, detail } = JSON.parse(text);
    return error ?? detail?.[0]?.msg ?? detail ?? text;
  } catch {
    return text || "The server did not do it and did not say why.";
  }
}

document.addEventListener("htmx:sseError", () => say("The server does not answer. This page goes on by itself when it is back."));
document.addEventListener("htmx:sseOpen", () => say(""));
document.addEventListener("htmx:afterRequest", ({ detail }) => {
  if (detail.xhr.status >= 400) say(readError(detail.xhr.responseText));
  else if (detail.successful && detail.requestConfig.verb === "post") say("");
});

document.addEventListener("click", (event) => {
  const head = event.target.closest(".sortable th");
  if (head) sort(head);
});

function sort(head) {
  const rows = [...head.closest("table").tBodies[0].rows];
  const place = head.cellIndex, sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const read = (row) => row.cells[place].dataset.value ?? row.cells[place].textContent.trim();
  rows.sort((a, b) => order(read(a), read(b), sign));
  rows.forEach((row) => row.parentNode.append(row));
}

function order(a, b, sign) {
  if (a === "" || b === "") return (a === "") - (b === ""); // what is not known comes last
  return sign * (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
}

document.addEventListener("change", async ({ target }) => {
  if (target.id === "pick-all") {
    for (const box of document.querySelectorAll("[form=compare]")) box.checked = target.checked;
  } else if (target.dataset.priority) {
    const answer = await fetch(`/api/experiments/${target.dataset.priority}/priority`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ priority: Number(target.value) }),
    }).catch(() => null);
    if (!answer) return; // the notice says it already
    target.value = target.defaultValue = answer.ok ? Number(target.value) : target.defaultValue;
    say(answer.ok ? "" : readError(await answer.text()));
  }
});

// What a reader has chosen, types, presses or stands on stays when the figures are brought anew.
let chosen = [], row = null, isPressed = false, late = null;
for (const type of ["keydown", "pointerdown"]) addEventListener(type, () => (isPressed = true), true);
for (const type of ["keyup", "pointerup", "pointercancel", "blur"]) addEventListener(type, release, true);

function release({ type, target }) {
  if (type === "blur" && target !== window) return;
  isPressed = false;
  if (late) setTimeout(htmx.trigger, 0, late, "tick");
  late = null;
}

document.addEventListener("htmx:beforeSwap", ({ detail }) => {
  const at = document.activeElement;
  const isTyping = at?.dataset.priority && at.value !== at.defaultValue && detail.target.contains(at);
  const isHeld = isPressed && detail.requestConfig.verb === "get"; // a button that is replaced under a finger does nothing
  if (isHeld) late = detail.elt;
  if (isHeld || isTyping) detail.shouldSwap = false;
  chosen = [...document.querySelectorAll("input[type=radio]:checked")].map((button) => button.id);
  row = at?.closest("[data-row]")?.dataset.row;
});
document.addEventListener("htmx:afterSwap", () => {
  for (const id of chosen) document.getElementById(id)?.click();
  if (row && document.activeElement === document.body) {
    document.querySelector(`[data-row="${CSS.escape(row)}"] :is(button, a)`)?.focus();
  }
});

// Figures of what runs change without an event.
setInterval(() => {
  const live = document.querySelector("[data-live]");
  if (live && !document.hidden) htmx.trigger(live.parentNode, "tick");
}, 3000);

const log = document.getElementById("log");
if (log) follow(log);

async function follow(log) {
  const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
  const facts = () => document.getElementById("facts").dataset;
  const decoder = new TextDecoder();
  let attempt = Number(log.dataset.attempt), offset = Number(log.dataset.start);
  for (;;) {
    const answer = await fetch(`/api/experiments/${log.dataset.id}/log?attempt=${attempt}&offset=${offset}`).catch(() => null);
    if (!answer?.ok) {
      await wait(2);
      continue;
    }
    const data = new Uint8Array(await answer.arrayBuffer());
    offset += data.length;
    if (data.length) {
      const atEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
      log.append(clean(decoder.decode(data, { stream: true })));
      if (atEnd) log.scrollTop = log.scrollHeight;
      if (log.textContent.length > 2e6) log.textContent = log.textContent.slice(-1e6);
    } else if (!("only" in log.dataset) && Number(facts().attempt) > attempt) {
      attempt += 1;
      offset = 0;
    } else {
      await wait("live" in facts() ? 1 : 3);
    }
  }
}

// Colours and moves of a terminal have no place in a page, nor has a bar that overwrites itself.
function clean(text) {
  return text.replace(/\x1b\[[0-?]*[ -/]*[@-~]/g, "").replace(/[^\n]*\r(?!\n)/g, "");
}

window.addEventListener("DOMContentLoaded", () => {
  const text = document.getElementById("text");
  if (text && window.CodeMirror) {
    // Tab leaves the editor, as it leaves every other field.
    const keys = { Tab: false, "Shift-Tab": false };
    const editor = CodeMirror.fromTextArea(text, { mode: "yaml", lineNumbers: true, extraKeys: keys, screenReaderLabel: "Configuration" });
    editor.on("change", () => editor.save());
    document.querySelector("label[for=text]").addEventListener("click", () => editor.focus());
  }
});
