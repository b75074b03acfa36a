// The blocks of the model from inputs to loss. A block opens into its nodes; forward and backward
// stand side by side. The lines to the left are what nodes read, in networkx's layout.
page.define("network", (chart, data) => {
  const { graph } = page;  // of these data, also when the page knows another one by now
  const { div } = chart;
  chart.open ??= new Set();
  // By the data alone: while they are on their way, the page may know another graph.
  const madeBy = new Map(data.outputs.flatMap((tensors, node) => tensors.map((tensor) => [tensor, node])));
  const rowOf = new Map();
  data.blocks.forEach((block, b) => block.rows.forEach((row, r) => row.nodes.forEach((nodes, side) => nodes.forEach((node) => rowOf.set(node, [b, r, side])))));
  const { make } = page;
  const shareOf = (bytes) => `${(100 * bytes) / Math.max(1, data.most_bytes)}%`;
  const part = (choice, bytes, tensor) => {
    const piece = make("i");
    piece.dataset.choice = choice;
    piece.style.width = shareOf(bytes);
    if (tensor !== undefined) piece.dataset.tensor = tensor;
    return piece;
  };
  const sideOf = (side, pieces) => make("span", "side", make("span", "pieces", ...pieces), make("small", "", side.text));
  const nameOf = (name) => {
    const cut = Math.max(0, name.length - 14);
    return make("span", "name", make("span", "", make("span", "", name.slice(0, cut)), make("span", "", name.slice(cut))));
  };
  const tensorsOf = (row) => row.nodes.flat().flatMap((node) => data.outputs[node]);
  const spoken = (name, sides) => `${name}: ${["forward", "backward"].map((way, at) => sides[at].text && `${way} ${sides[at].text} (${sides[at].words})`).filter(Boolean).join("; ") || "no bytes"}`;
  let lines = [];

  // -- rows -------------------------------------------------------------------------------------
  const lineOf = (entry, level, b, r, pieces) => {
    const element = make("div", level === 1 ? "line block" : "line", make("span", "gutter"), nameOf(entry.name), ...entry.sides.map((side, at) => sideOf(side, pieces[at])));
    element.role = "treeitem";
    element.ariaLevel = String(level);
    element.tabIndex = -1;
    element.title = entry.name;
    element.ariaLabel = spoken(entry.name, entry.sides);
    return { element, entry, level, b, r };
  };
  const piecesOf = (row) => row.nodes.map((nodes) => nodes.flatMap(
    (node) => data.outputs[node].filter((tensor) => graph.tensors[tensor][1]).map((tensor) => part(data.choices[tensor], graph.tensors[tensor][1], tensor)),
  ));
  const opens = (block) => block.rows.length > 1;
  const rows = () => data.blocks.flatMap((block, b) => {
    if (!opens(block)) return [lineOf({ ...block.rows[0], name: block.name, x: block.x }, 1, b, 0, piecesOf(block.rows[0]))];
    const open = chart.open.has(block.name);
    const head = lineOf(block, 1, b, null, block.sides.map((side) => side.parts.map(([choice, bytes]) => part(choice, bytes))));
    head.element.ariaExpanded = String(open);
    return open ? [head, ...block.rows.map((row, r) => lineOf(row, 2, b, r, piecesOf(row)))] : [head];
  });
  const build = (focused) => {
    lines = rows();
    const tree = make("div", "tree", ...lines.map((line) => line.element));
    tree.role = "tree";
    tree.ariaLabel = div.getAttribute("aria-label");
    const heads = make("div", "line heads", make("span", "gutter"), make("span", "name", "block"), make("span", "side", "forward"), make("span", "side", "backward"));
    heads.ariaHidden = "true";
    const top = div.scrollTop;
    div.replaceChildren(heads, tree);
    div.scrollTop = top;
    const first = lines.find((line) => focused && line.b === focused.b && line.r === focused.r) || lines[0];
    if (first) first.element.tabIndex = 0;
    if (focused && first) first.element.focus({ preventScroll: true });
    tree.addEventListener("click", (event) => {
      const line = lines.find((one) => one.element === event.target.closest(".line"));
      if (line) pick(line, event.target.dataset.tensor);
    });
    tree.addEventListener("keydown", keyed);
    tree.addEventListener("pointerover", (event) => {
      const line = lines.find((one) => one.element === event.target.closest(".line"));
      if (line) tell(line, event.target.dataset.tensor);
    });
    tree.addEventListener("focusin", (event) => {
      const line = lines.find((one) => one.element === event.target);
      if (line) tell(line);
    });
    connect();
    if (page.selected !== null) light(page.selected, false);
  };

  // -- lines between rows: what reads what in the forward pass ------------------------------------
  const SVG = "http://www.w3.org/2000/svg";
  const shape = (tag, attributes) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const connect = () => {
    const tree = div.querySelector(".tree");
    tree.querySelector("svg")?.remove();
    const wide = tree.querySelector(".gutter")?.offsetWidth || 0;
    const spot = (line) => [wide * (0.55 + 0.27 * line.entry.x), line.element.offsetTop + line.element.offsetHeight / 2];
    const place = new Map();
    lines.forEach((line, at) => {
      if (line.entry.x === null || (line.level === 1 && chart.open.has(line.entry.name))) return;
      const inside = line.r === null ? line.entry.rows.flatMap((row) => row.nodes[0]) : line.entry.nodes[0];
      for (const node of inside) place.set(node, at);
    });
    const svg = shape("svg", { width: wide, height: tree.offsetHeight, "aria-hidden": "true" });
    const drawn = new Set();
    for (const [node, to] of place) for (const tensor of data.reads[node]) {
      const from = place.get(madeBy.get(tensor));
      const key = `${from} ${to}`;
      if (from === undefined || from === to || drawn.has(key)) continue;
      drawn.add(key);
      const [[x, y], [u, v]] = [spot(lines[from]), spot(lines[to])];
      const aside = Math.abs(to - from) > 1 ? Math.min(0.45 * wide, 6 + 3 * Math.abs(to - from)) : 0;
      const bend = Math.max(2, Math.min(x, u) - aside);
      const third = (v - y) / 3;
      svg.append(shape("path", { d: aside ? `M${x} ${y}C${bend} ${y + third} ${bend} ${v - third} ${u} ${v}` : `M${x} ${y}C${x} ${y + third} ${u} ${v - third} ${u} ${v}`, "data-from": from, "data-to": to }));
    }
    for (const at of new Set(place.values())) {
      const [x, y] = spot(lines[at]);
      svg.append(shape("circle", { cx: x, cy: y, r: lines[at].level === 1 ? 4.5 : 3 }));
    }
    tree.prepend(svg);
  };

  // -- choosing ---------------------------------------------------------------------------------
  const about = (tensor) => `${graph.tensors[tensor][0]}: ${data.sizes[tensor]}, ${data.choices[tensor]}`;
  const tell = (line, tensor) => chart.say(tensor === undefined ? spoken(line.entry.name, line.entry.sides) : about(Number(tensor)));
  const turn = (line, open) => {
    if (open) chart.open.add(line.entry.name); else chart.open.delete(line.entry.name);
    build(line);
  };
  const pick = (line, tensor) => {
    focus(line);
    if (line.r === null) { turn(line, !chart.open.has(line.entry.name)); return; }
    const tensors = tensorsOf(line.entry);
    const next = tensor === undefined ? tensors[tensors.indexOf(page.selected) + 1] : Number(tensor);
    page.select(next === undefined || next === page.selected ? null : next);
  };
  const reveal = (element) => page.reveal(element, div, div.querySelector(".heads"));
  const focus = (line) => {
    for (const other of lines) other.element.tabIndex = -1;
    line.element.tabIndex = 0;
    line.element.focus({ preventScroll: true });
    reveal(line.element);
  };
  const keyed = (event) => {
    const at = lines.findIndex((line) => line.element === event.target);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const line = lines[at];
    const to = page.rowAt(event.key, at, lines.length);
    if (to !== undefined) focus(lines[to]);
    else if (event.key === "Enter" || event.key === " ") pick(line);
    else if (event.key === "ArrowRight" && line.r === null) turn(line, true);
    else if (event.key === "ArrowLeft") {
      const head = lines.find((one) => one.level === 1 && one.b === line.b);
      if (line.r === null) turn(head, false); else focus(head);
    } else return;
    event.preventDefault();
  };
  const light = (tensor, follow = true) => {
    div.querySelectorAll(".lit, .reads").forEach((one) => one.classList.remove("lit", "reads"));
    if (tensor === null) return;
    const place = rowOf.get(madeBy.get(tensor));
    if (!place) return;
    const here = (b, r) => lines.find((line) => line.b === b && (line.r === r || (line.r === null && !chart.open.has(line.entry.name))));
    const found = here(place[0], place[1]);
    data.reads.forEach((read, node) => {
      const reader = read.includes(tensor) && rowOf.get(node);
      const line = reader && here(reader[0], reader[1]);
      if (line) line.element.querySelectorAll(".side")[reader[2]].classList.add("reads");
    });
    if (!found) return;
    found.element.classList.add("lit");
    lines.find((line) => line.level === 1 && line.b === place[0]).element.classList.add("lit");
    div.querySelectorAll(`[data-tensor="${tensor}"]`).forEach((piece) => piece.classList.add("lit"));
    const readers = data.reads.flatMap((read, node) => (read.includes(tensor) ? [graph.nodes[node]] : []));
    chart.say(`${about(tensor)}; ${readers.length ? `read by ${readers.join(", ")}` : "nothing reads it"}`);
    if (follow) reveal(found.element);
  };
  const draw = () => {
    build();
    div.dataset.ready = "yes";
    if (!chart.watch) { chart.watch = new ResizeObserver(() => chart.again()); chart.watch.observe(div); }
    chart.again = connect;
  };
  return { draw, light };
});
