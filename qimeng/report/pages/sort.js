"use strict";
// Tables with data-sortable are sorted by the buttons in their heads; numbers by the cells' data-value.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const order = (a, b) => {
        const [x, y] = [Number(a), Number(b)];
        return a !== "" && b !== "" && !Number.isNaN(x) && !Number.isNaN(y) ? x - y : a.localeCompare(b);
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => order(key(a), key(b)) * (up ? 1 : -1));
      table.tBodies[0].append(...rows);
    });
  });
}
