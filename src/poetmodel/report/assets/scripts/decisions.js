// The table of decisions: filtered, sorted, and part of the selection.
(() => {
  const table = page.$("decision-table");
  const rows = Array.from(table.tBodies[0].rows);
  const words = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const wanted = page.$("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const choice = page.$("choice").value;
    let shown = 0;
    rows.forEach((row, at) => {
      const fits = (!choice || row.dataset.choice === choice) && wanted.every((word) => words[at].includes(word));
      row.hidden = !fits;
      shown += fits ? 1 : 0;
    });
    page.$("count").textContent = `${shown} of ${rows.length} rows`;
  };
  page.$("filter").addEventListener("input", filter);
  page.$("choice").addEventListener("change", filter);
  const sortBy = (head, at) => {
    const first = head.classList.contains("n") ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === first ? other : first;
    table.querySelectorAll("th[aria-sort]").forEach((cell) => cell.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const key = (row) => {
      const cell = row.cells[at];
      return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent.toLowerCase();
    };
    const keyed = rows.map((row, place) => [key(row), place, row]);
    keyed.sort((a, b) => (a[0] < b[0] ? -sign : a[0] > b[0] ? sign : a[1] - b[1]));
    table.tBodies[0].append(...keyed.map((entry) => entry[2]));
  };
  table.querySelectorAll("thead th").forEach((head, at) => {
    head.firstElementChild.addEventListener("click", () => sortBy(head, at));
  });
  filter();
  const byTensor = new Map();
  rows.forEach((row) => {
    const tensor = Number(row.dataset.tensor);
    byTensor.set(tensor, [...(byTensor.get(tensor) || []), row]);
    row.addEventListener("click", () => page.select(tensor === page.selected ? null : tensor));
  });
  page.onSelect((tensor) => {
    table.querySelectorAll("tr.lit").forEach((row) => row.classList.remove("lit"));
    for (const row of byTensor.get(tensor) || []) row.classList.add("lit");
  });
})();
