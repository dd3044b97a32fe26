// Sorts the table of rows by a column whose title is pressed: figures the largest first, what has none last.
for (const table of document.querySelectorAll("table.rows")) {
  const heads = [...table.querySelectorAll("th")];
  const read = (row, at) => row.cells[at].textContent.replace(/,/g, "").replace("−", "-").replace(/^t(?=\d)/, "");
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.onclick = () => {
      const sign = head.ariaSort === "descending" ? 1 : -1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.ariaSort = sign < 0 ? "descending" : "ascending";
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [read(a, at), read(b, at)], [n, m] = [parseFloat(x), parseFloat(y)];
        if (isNaN(n) || isNaN(m)) return isNaN(n) - isNaN(m) || sign * x.localeCompare(y);
        return sign * (n - m);
      });
      table.tBodies[0].append(...rows);
    };
  });
}
