// The table of decisions: equal tensors are one row that unfolds; rows are filtered, sorted and
// selected. The rows are part of the page, or are created from data that may change.
(() => {
  const table = page.$("decision-table");
  const body = table.tBodies[0];
  const box = table.closest(".wide");
  const unfold = page.$("unfold");
  const opened = new Set();
  let units = [];
  let byTensor = new Map();
  let total = 0;
  let sorted = null;

  // A unit is a row that is always shown, and the rows of its members.
  const take = () => {
    units = [];
    byTensor = new Map();
    const several = table.querySelector("thead .label") !== null;
    for (const row of body.rows) {
      const member = row.classList.contains("member");
      if (!member) units.push({ row, key: `${several ? row.cells[0].textContent : ""} ${row.cells[+several].title}`, members: [], words: row.textContent.toLowerCase() });
      const unit = units[units.length - 1];
      if (member) unit.members.push({ row, words: row.textContent.toLowerCase() });
      row.tabIndex = -1;
      row.ariaLevel = member ? "2" : "1";
      if ("tensor" in row.dataset) {
        const tensor = Number(row.dataset.tensor);
        byTensor.set(tensor, [...(byTensor.get(tensor) || []), { row, unit }]);
      }
      for (const cell of row.querySelectorAll("td.n")) cell.classList.toggle("nothing", cell.textContent === "0");
    }
    if (units.length) units[0].row.tabIndex = 0;
    total = Array.from(byTensor.values()).reduce((sum, rows) => sum + rows.length, 0);
    unfold.hidden = !units.some((unit) => unit.members.length);
  };
  const show = () => {
    const wanted = page.$("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const choice = page.$("choice").value;
    let shown = 0;
    let rows = 0;
    for (const unit of units) {
      const fits = (words) => wanted.every((word) => words.includes(word) || unit.words.includes(word));
      const right = !choice || unit.row.dataset.choice === choice;
      const found = unit.members.filter((member) => right && fits(member.words));
      const open = opened.has(unit.key) || (found.length > 0 && found.length < unit.members.length);
      const here = unit.members.length ? found.length > 0 : right && fits(unit.words);
      unit.row.hidden = !here;
      if (unit.members.length) unit.row.ariaExpanded = String(open);
      for (const member of unit.members) member.row.hidden = !open || !found.includes(member);
      shown += unit.members.length ? found.length : here;
      rows += here;
    }
    page.$("count").textContent = `${shown} of ${total} tensors in ${rows} row${rows === 1 ? "" : "s"}`;
  };
  const sort = () => {
    if (!sorted) return;
    const sign = sorted.order === "ascending" ? 1 : -1;
    const key = ({ row }) => {
      const cell = row.cells[sorted.at];
      return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent.toLowerCase();
    };
    const inOrder = (rows) => rows.map((one, place) => [key(one), place, one])
      .sort((a, b) => (a[0] < b[0] ? -sign : a[0] > b[0] ? sign : a[1] - b[1])).map((entry) => entry[2]);
    body.append(...inOrder(units).flatMap((unit) => [unit.row, ...inOrder(unit.members).map((member) => member.row)]));
  };
  const sortBy = (head, at) => {
    const first = head.classList.contains("n") ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === first ? other : first;
    table.querySelectorAll("th[aria-sort]").forEach((cell) => cell.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    sorted = { at, order };
    sort();
  };
  const turn = (unit, open = !opened.has(unit.key)) => {
    if (open) opened.add(unit.key); else opened.delete(unit.key);
    show();
  };

  // -- filtering and sorting --------------------------------------------------------------------
  const unitOf = (row) => units.find((unit) => unit.row === row || unit.members.some((member) => member.row === row));
  const choose = (row) => {
    if (!("tensor" in row.dataset)) { turn(unitOf(row)); return; }
    const tensor = Number(row.dataset.tensor);
    page.select(tensor === page.selected ? null : tensor);
  };
  const focus = (row) => {
    body.querySelectorAll('tr[tabindex="0"]').forEach((other) => { other.tabIndex = -1; });
    row.tabIndex = 0;
    row.focus({ preventScroll: true });
    reveal(row);
  };
  const reveal = (row) => page.reveal(row, box, table.tHead);
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row && window.getSelection().isCollapsed) choose(row);
  });
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const rows = Array.from(body.rows).filter((other) => !other.hidden);
    const unit = unitOf(row);
    const to = page.rowAt(event.key, rows.indexOf(row), rows.length);
    if (to !== undefined) focus(rows[to]);
    else if (event.key === "Enter" || event.key === " ") choose(row);
    else if (event.key === "ArrowRight" && row === unit.row && unit.members.length) turn(unit, true);
    else if (event.key === "ArrowLeft" && unit.members.length) { turn(unit, false); focus(unit.row); }
    else return;
    event.preventDefault();
  });
  const light = (tensor) => {
    table.querySelectorAll("tr.lit").forEach((row) => { row.classList.remove("lit"); row.ariaSelected = null; });
    const found = byTensor.get(tensor) || [];
    for (const { unit } of found) if (unit.members.length && !opened.has(unit.key)) turn(unit, true);
    for (const { row } of found) { row.classList.add("lit"); row.ariaSelected = "true"; }
    const seen = found.find(({ row }) => !row.hidden);
    if (seen) reveal(seen.row);
  };

  // -- rows from data ----------------------------------------------------------------------------
  const span = (...content) => page.make("span", "", ...content);
  const rowOf = (entry, kind) => {
    const row = page.make("tr", kind);
    row.dataset.choice = entry.choice;
    if (entry.tensor !== null) row.dataset.tensor = entry.tensor;
    const name = page.make("td", "name", span(span(entry.name.slice(0, entry.tail)), span(entry.name.slice(entry.tail))));
    name.title = entry.name;
    row.append(name, page.make("td", "choice", page.make("i"), entry.choice));
    for (const [value, text] of entry.cells) {
      const figure = page.make("td", "n", text);
      figure.dataset.v = value;
      row.append(figure);
    }
    return row;
  };
  const fill = (entries) => {
    body.replaceChildren(...entries.flatMap((entry) => [
      rowOf(entry, entry.members.length ? "fold" : ""), ...entry.members.map((member) => rowOf(member, "member")),
    ]));
    arrange();
  };
  const arrange = () => {
    take();
    sort();
    show();
    light(page.selected);
  };

  table.role = "treegrid";
  table.querySelectorAll("thead th").forEach((head, at) => {
    head.firstElementChild.addEventListener("click", () => sortBy(head, at));
  });
  page.$("filter").addEventListener("input", show);
  page.$("choice").addEventListener("change", show);
  unfold.addEventListener("click", () => {
    const open = unfold.ariaPressed !== "true";
    unfold.ariaPressed = String(open);
    unfold.textContent = open ? "Fold all" : "Unfold all";
    opened.clear();
    if (open) for (const unit of units) opened.add(unit.key);
    show();
  });
  page.onSelect(light);
  page.define("decisions", (chart, data) => ({ draw: () => fill(data.rows) }));
  arrange();
})();
