"use strict";
// Common code of all pages: colours, plotly, the selected tensor, and the life cycle of charts.
//
// A chart is defined by `page.define(type, (chart, data) => view)`, a function of its data. The view
// has draw(), which returns plotly's promise, and optionally hover(event), click(event),
// key(name) -> whether it handled the key, light(tensor), which highlights the selected tensor (its
// index, or null), and read(x), which shows the contents at a position of the x axis (null when the
// pointer leaves). `page.replace(id, data)` replaces the data of a chart and redraws it.
const page = (() => {
  const data = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const SKINS = {
    light: { ground: "#ffffff", ink: "#16202a", faint: "#566370", line: "#e2e6ea", curve: "#3d4a55", limit: "#a11226", colour: "light" },
    dark: { ground: "#12171c", ink: "#e6ebef", faint: "#9fadb9", line: "#2a343d", curve: "#b4c0ca", limit: "#ff8b8b", colour: "dark" },
  };
  const PAPER_PIXELS = 680;
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const narrow = () => window.innerWidth < 736;
  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const plain = (text) => String(text).replace(/&lt;/g, "<").replace(/&amp;/g, "&");
  let skin = SKINS.light;
  let onPaper = false;

  // -- theme: that of the system, until the user selects one -----------------------------------
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const button = $("theme");
  const wear = (name) => {
    root.dataset.theme = name;
    skin = SKINS[name];
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to ${name === "dark" ? "light" : "dark"} colours`);
  };
  let chosen = null;
  wear(dark.matches ? "dark" : "light");
  button.hidden = false;
  const change = (name) => { wear(name); drawAll(); };
  button.addEventListener("click", () => { chosen = root.dataset.theme === "dark" ? "light" : "dark"; change(chosen); });
  dark.addEventListener("change", () => { if (!chosen) change(dark.matches ? "dark" : "light"); });

  // -- the graph: names of nodes and tensors, by index -----------------------------------------
  let graph = data.graph;
  let numbers = new Map();
  const know = (found) => {
    graph = found;
    numbers = new Map(found ? found.tensors.map((tensor, i) => [tensor[0], i]) : []);
    selected = fromHash();
  };

  // -- the selected tensor: highlighted in charts and tables, and part of the address ----------
  let selected = null;
  const listeners = [];
  const fromHash = () => {
    const found = /^#tensor=(.+)$/.exec(window.location.hash);
    if (!found) return null;
    try { return numbers.get(decodeURIComponent(found[1])) ?? null; } catch { return null; }
  };
  know(data.graph);
  const tell = () => {
    root.dataset.selected = selected === null ? "" : graph.tensors[selected][0];
    for (const listen of listeners) listen(selected);
  };
  const show = () => {
    tell();
    for (const chart of charts.values()) if (chart.drawn && chart.view.light) chart.view.light(selected);
  };
  const select = (tensor) => {
    if (tensor === selected) return;
    selected = tensor;
    const { pathname, search } = window.location;
    const hash = tensor === null ? "" : `#tensor=${encodeURIComponent(graph.tensors[tensor][0])}`;
    if (tensor !== null || window.location.hash.startsWith("#tensor=")) window.history.replaceState(null, "", pathname + search + hash);
    show();
  };
  window.addEventListener("hashchange", () => { const found = fromHash(); if (found !== null && found !== selected) { selected = found; show(); } });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") select(null); });

  // -- common settings of charts ---------------------------------------------------------------
  const config = () => ({
    displaylogo: false, responsive: true, displayModeBar: true,
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
  });
  const number = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toPrecision(3) : String(Number(value.toPrecision(4))));
  const unitOf = (bytes) => [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find((unit) => bytes >= unit[1]) || ["B", 1];
  const size = (bytes) => {
    const [unit, factor] = unitOf(bytes);
    return `${factor === 1 ? bytes : (bytes / factor).toFixed(2)} ${unit}`;
  };
  // A logarithmic axis from low to high whose labels are plain numbers: 0.1, 0.2, 0.5, 1, ...
  const log = (low, high) => {
    const decades = Math.log10(high / low), steps = decades < 0.7 ? [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : decades < 3 ? [1, 2, 5] : [1];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.ceil(Math.log10(high)); power += 1) for (const step of steps) ticks.push(Number(`${step}e${power}`));
    return { type: "log", tickvals: ticks, ticktext: ticks.map(String), range: [Math.log10(low), Math.log10(high)] };
  };
  const axis = (extra) => ({
    gridcolor: skin.line, linecolor: skin.line, zerolinecolor: skin.line, automargin: true,
    tickfont: { size: narrow() ? 10 : 11 }, ...extra,
  });
  const layout = (extra) => ({
    paper_bgcolor: skin.ground, plot_bgcolor: skin.ground,
    font: { color: skin.ink, size: 12, family: "system-ui, 'DejaVu Sans', sans-serif" },
    margin: { l: narrow() ? 44 : 64, r: 12, t: 34, b: 44 }, hovermode: "closest",
    hoverlabel: { align: "left", font: { size: 12 } }, showlegend: false,
    dragmode: coarse ? false : "zoom", autosize: !onPaper, width: onPaper ? PAPER_PIXELS : undefined,
    modebar: { bgcolor: "rgba(0,0,0,0)", color: skin.faint, activecolor: skin.ink }, ...extra,
  });
  const colour = (kind) => data.kinds[kind][skin.colour];
  const pointed = (event) => plain(event.points[0].hovertext || event.points[0].text || "");
  const zoom = (div, factor, towards = {}) => {  // the point `towards` stays fixed
    const change = {};
    for (const name of div.dataset.axes.split(" ")) {
      const [low, high] = div.layout[name].range;
      const still = towards[name] ?? (low + high) / 2;
      change[`${name}.range`] = [still + (low - still) * factor, still + (high - still) * factor];
    }
    return window.Plotly.relayout(div, change);
  };
  const reset = (div) => {
    const change = {};
    for (const name of div.dataset.axes.split(" ")) {
      if (div.whole) change[`${name}.range`] = div.whole[name];
      else change[`${name}.autorange`] = true;
    }
    return window.Plotly.relayout(div, change);
  };

  // -- parts of charts ---------------------------------------------------------------------------
  const make = (tag, name, ...content) => {  // an element with its class
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.append(...content);
    return element;
  };
  const within = (value, most) => Math.min(most, Math.max(0, value));
  const lastUpTo = (most, count, valueAt) => {  // the index of the last value of a growing sequence that is at most `most`
    let low = 0, high = count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (valueAt(middle) <= most) low = middle; else high = middle - 1;
    }
    return low;
  };
  const upright = (x) => (x === null ? [] : [{ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: skin.ink, width: 1 } }]);
  const arrow = (x, y) => ({ x, y, text: "", showarrow: true, ax: 0, ay: -30, arrowcolor: skin.limit, arrowwidth: 2 });
  const step = (key, count) => ({ ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -count, End: count }[key]);
  const rowAt = (key, at, count) => {  // the row to which a key moves in a table or tree
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 10, PageUp: at - 10, Home: 0, End: count - 1 }[key];
    return to === undefined ? undefined : within(to, count - 1);
  };
  const reveal = (row, box, head) => {  // scrolls a box so that a row is visible below its head
    const [inner, outer] = [row.getBoundingClientRect(), box.getBoundingClientRect()];
    const top = outer.top + head.offsetHeight;
    if (inner.top < top || inner.bottom > outer.bottom) box.scrollTop += inner.top - top - (outer.bottom - top) / 3;
  };

  // -- life cycle of a chart: drawn when scrolled near the window, then updated -----------------
  const makers = {};
  const charts = new Map();
  const define = (type, make) => { makers[type] = make; };
  const listen = (chart) => {
    const { div } = chart;
    if (div.dataset.ready) return;
    div.dataset.ready = "yes";
    if (!div.on) return;
    const at = (event) => {
      const { xaxis } = div._fullLayout;
      const x = event.clientX - div.getBoundingClientRect().left - xaxis._offset;
      return x < 0 || x > xaxis._length ? null : xaxis.p2d(x);
    };
    for (const name of ["pointermove", "pointerdown"]) div.addEventListener(name, (event) => chart.view.read && chart.view.read(at(event)));
    div.addEventListener("pointerleave", () => chart.view.read && chart.view.read(null));
    div.on("plotly_hover", (event) => chart.view.hover && chart.view.hover(event));
    div.on("plotly_click", (event) => (chart.view.click || chart.view.hover || (() => {}))(event));
    div.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "+" || event.key === "=") zoom(div, 0.5, chart.view.centre?.());
      else if (event.key === "-") zoom(div, 2, chart.view.centre?.());
      else if (event.key === "0") reset(div);
      else if (!chart.view.key || !chart.view.key(event.key)) return;
      event.preventDefault();
    });
  };
  const draw = async (chart) => {
    await chart.view.draw();
    listen(chart);
    if (selected !== null && chart.view.light) chart.view.light(selected);
  };
  const drawAll = async () => { for (const chart of charts.values()) if (chart.drawn) await draw(chart); };
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) {
      const chart = charts.get(entry.target.id);
      near.unobserve(entry.target);
      if (!chart.drawn) { chart.drawn = true; draw(chart); }
    }
  }, { rootMargin: "400px" });
  const mount = (id, type, found) => {
    const chart = { id, type, div: $(id), drawn: false };
    chart.say = (text) => { $(`${id}-readout`).textContent = text; };
    chart.view = makers[type](chart, found);
    charts.set(id, chart);
    near.observe(chart.div);
  };
  const replace = (id, found) => {
    const chart = charts.get(id);
    chart.view = makers[chart.type](chart, found);
    return chart.drawn ? draw(chart) : undefined;
  };

  // -- plotly is compressed: it is decompressed after the page is loaded ------------------------
  const unpack = async () => {
    const packed = $("plotly").textContent.trim();
    const digits = new Uint8Array(128).fill(84);  // base 85, as written by poetmodel.report.template
    [..."0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~"].forEach((letter, digit) => { digits[letter.charCodeAt(0)] = digit; });
    const groups = Math.ceil(packed.length / 5);
    const view = new DataView(new ArrayBuffer(4 * groups));
    for (let group = 0; group < groups; group += 1) {
      let value = 0;
      for (let at = 5 * group; at < 5 * group + 5; at += 1) value = 85 * value + (at < packed.length ? digits[packed.charCodeAt(at)] : 84);
      view.setUint32(4 * group, value);
    }
    const bytes = new Uint8Array(view.buffer, 0, 4 * groups - (5 * groups - packed.length));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };
  let stand;
  const ready = new Promise((resolve) => { stand = resolve; });
  const start = async () => {
    try {
      await unpack();
      for (const chart of data.charts) mount(chart.id, chart.type, chart);
      selected = fromHash();
      if (selected !== null) show();
      stand();
      root.dataset.ready = String(Math.round(performance.now()));
    } catch (error) {
      document.querySelectorAll(".chart").forEach((div) => { div.textContent = "The charts need a browser of 2023 or later; all figures are in the tables."; });
      throw error;
    }
  };
  const opened = () => document.querySelectorAll("details[data-for-print]");
  window.addEventListener("beforeprint", () => { document.querySelectorAll("details:not([open])").forEach((one) => { one.dataset.forPrint = ""; one.open = true; }); skin = SKINS.light; onPaper = true; charts.forEach((chart) => { chart.drawn = true; }); drawAll(); });
  window.addEventListener("afterprint", () => { opened().forEach((one) => { one.open = false; delete one.dataset.forPrint; }); onPaper = false; skin = SKINS[root.dataset.theme]; drawAll(); });
  const soon = window.requestIdleCallback || ((job) => setTimeout(job, 200));
  window.addEventListener("load", () => soon(start, { timeout: 1500 }));

  return {
    $, data, ready, define, mount, replace, select, escaped, plain, pointed, narrow, coarse, config, axis, log, layout, colour, number, unitOf, size,
    make, within, lastUpTo, upright, arrow, step, rowAt, reveal,
    know: (found) => { know(found); tell(); },
    onSelect: (heard) => listeners.push(heard),
    get graph() { return graph; },
    get selected() { return selected; },
    get skin() { return skin; },
  };
})();
