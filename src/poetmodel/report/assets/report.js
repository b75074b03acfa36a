"use strict";
(() => {
  const data = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const SKINS = {
    light: { ground: "#ffffff", ink: "#16202a", faint: "#566370", line: "#e2e6ea", curve: "#3d4a55", limit: "#a11226", colour: "light" },
    dark: { ground: "#12171c", ink: "#e6ebef", faint: "#9fadb9", line: "#2a343d", curve: "#b4c0ca", limit: "#ff8b8b", colour: "dark" },
  };
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon"];
  const narrow = () => window.innerWidth < 736;
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const NOTHING = [0, false, "not in RAM at the start of the stage; no action"];
  const PAPER_PIXELS = 680;
  let skin = SKINS.light;
  let onPaper = false;

  // -- theme: as the system says, until one is chosen ------------------------------------------
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

  // -- the table of decisions ------------------------------------------------------------------
  const table = $("decision-table");
  const rows = Array.from(table.tBodies[0].rows);
  const words = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const wanted = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const choice = $("choice").value;
    let shown = 0;
    rows.forEach((row, at) => {
      const fits = (!choice || row.dataset.choice === choice) && wanted.every((word) => words[at].includes(word));
      row.hidden = !fits;
      shown += fits ? 1 : 0;
    });
    $("count").textContent = `${shown} of ${rows.length} rows`;
  };
  $("filter").addEventListener("input", filter);
  $("choice").addEventListener("change", filter);
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

  // -- what all charts share -------------------------------------------------------------------
  const config = () => ({
    displaylogo: false, responsive: true, displayModeBar: true,
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
  });
  const axis = (extra) => ({
    gridcolor: skin.line, linecolor: skin.line, zerolinecolor: skin.line, automargin: true,
    tickfont: { size: narrow() ? 10 : 11 }, ...extra,
  });
  const layout = (extra) => ({
    paper_bgcolor: skin.ground, plot_bgcolor: skin.ground,
    font: { color: skin.ink, size: 12, family: "system-ui, 'DejaVu Sans', sans-serif" },
    margin: { l: narrow() ? 44 : 64, r: 12, t: 34, b: 44 }, hovermode: "closest",
    hoverlabel: { align: "left", font: { size: 12 } }, showlegend: false,
    dragmode: coarse ? false : "zoom", autosize: !onPaper, width: onPaper ? PAPER_PIXELS : undefined, modebar: { bgcolor: "rgba(0,0,0,0)", color: skin.faint, activecolor: skin.ink },
    ...extra,
  });
  const colour = (kind) => data.kinds[kind][skin.colour];
  const say = (id, text) => { $(`${id}-readout`).textContent = text; };
  const zoom = (div, factor) => {
    const change = {};
    for (const name of div.dataset.axes.split(" ")) {
      const [low, high] = div.layout[name].range;
      const half = ((high - low) / 2) * factor;
      change[`${name}.range`] = [(low + high) / 2 - half, (low + high) / 2 + half];
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
  const onKeys = (div, move) => {
    div.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "+" || event.key === "=") zoom(div, 0.5);
      else if (event.key === "-") zoom(div, 2);
      else if (event.key === "0") reset(div);
      else if (!move(event.key)) return;
      event.preventDefault();
    });
  };

  // -- the map of stages -----------------------------------------------------------------------
  const mapOf = (id, map) => {
    const div = $(id);
    const n = map.columns.length;
    const filled = (value) => Array.from({ length: n }, () => new Array(n).fill(value));
    let codes;
    let texts;
    const named = (row, column) => `${map.columns[column]}, stage ${row} (${map.columns[row]})`;
    const lines = (row, column, label) => `${named(row, column)}: ${label[2]}`;
    const marks = { x: [], y: [], text: [] };
    const at = new Map();
    const fill = () => {
      codes = filled(null);
      texts = filled("");
      for (const [column, first, last, which] of map.runs) {
        const label = map.labels[which];
        const head = `<b>${escaped(map.columns[column])}</b><br>stage `;
        const tail = `<br>${escaped(label[2]).replace(/; /g, "<br>")}`;
        for (let row = first; row <= last; row += 1) {
          codes[row][column] = label[0];
          texts[row][column] = `${head}${row} (${escaped(map.columns[row])})${tail}`;
          at.set(row * n + column, label);
          if (label[1]) { marks.x.push(column); marks.y.push(row); marks.text.push(texts[row][column]); }
        }
      }
    };
    const cursor = [0, 0];
    const draw = () => {
      if (!codes) fill();
      const steps = data.kinds.length;
      const scale = data.kinds.flatMap((_, kind) => [[kind / steps, colour(kind)], [(kind + 1) / steps, colour(kind)]]);
      const names = { title: { text: "node", standoff: 4 }, showgrid: false, zeroline: false, nticks: narrow() ? 5 : 12 };
      const traces = [
        { type: "heatmap", z: codes, text: texts, hoverinfo: "text", colorscale: scale, zmin: -0.5, zmax: steps - 0.5, showscale: false, xgap: n < 120 ? 1 : 0, ygap: n < 120 ? 1 : 0 },
        { type: "scatter", mode: "markers", x: marks.x, y: marks.y, text: marks.text, hoverinfo: "text", marker: { symbol: "triangle-down", size: n < 120 ? 9 : 6, color: colour(data.marked), line: { width: 0.5, color: skin.ground } } },
      ];
      div.dataset.axes = "xaxis yaxis";
      div.whole = { xaxis: [-0.5, n - 0.5], yaxis: [n - 0.5, -0.5] };
      return window.Plotly.react(div, traces, layout({
        xaxis: axis({ ...names, range: div.whole.xaxis }),
        yaxis: axis({ ...names, title: { text: "stage", standoff: 4 }, range: div.whole.yaxis }),
        uirevision: "kept",
      }), config()).then(() => {
        if (div.dataset.ready) return;
        div.dataset.ready = "yes";
        const tell = (event) => say(id, lines(event.points[0].y, event.points[0].x, at.get(event.points[0].y * n + event.points[0].x) || NOTHING));
        div.on("plotly_hover", tell);
        div.on("plotly_click", tell);
        onKeys(div, (key) => {
          const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -n], End: [0, n], PageUp: [-10, 0], PageDown: [10, 0] }[key];
          if (!step) return false;
          for (const side of [0, 1]) cursor[side] = Math.min(n - 1, Math.max(0, cursor[side] + step[side]));
          const [row, column] = cursor;
          say(id, lines(row, column, at.get(row * n + column) || NOTHING));
          window.Plotly.relayout(div, { shapes: [{ type: "rect", x0: column - 0.6, x1: column + 0.6, y0: row - 0.6, y1: row + 0.6, line: { color: skin.limit, width: 3 } }] });
          return true;
        });
      });
    };
    return draw;
  };

  // -- core, bus and RAM over time -------------------------------------------------------------
  const timelineOf = (id, line) => {
    const div = $(id);
    const lanes = line.lanes.length > 0;
    const order = line.bars.map((bar, at) => [bar[2], at]).sort((a, b) => a[0] - b[0]).map((entry) => entry[1]);
    let cursor = -1;
    const draw = () => {
      const traces = [];
      const least = 0.002 * (line.x[line.x.length - 1] || 1);
      data.kinds.forEach((_, kind) => {
        const bars = line.bars.filter((bar) => bar[1] === kind);
        if (!bars.length) return;
        traces.push({
          type: "bar", orientation: "h", yaxis: "y2", base: bars.map((bar) => bar[2]), x: bars.map((bar) => bar[3]), y: bars.map((bar) => line.lanes[bar[0]]),
          hovertext: bars.map((bar) => escaped(bar[4])), hoverinfo: "text", name: data.kinds[kind].name, textposition: "none",
          marker: { color: colour(kind), line: { width: 0.5, color: bars.map((bar) => (bar[3] < least ? colour(kind) : skin.ground)) }, pattern: kind === data.stall ? { shape: "/", fillmode: "overlay", fgcolor: skin.ground, fgopacity: 0.6, size: 6, solidity: 0.25 } : undefined },
        });
      });
      traces.push({ type: "scatter", mode: "lines", x: line.x, y: line.y, text: line.texts ? line.texts.map(escaped) : undefined, hovertemplate: line.texts ? "%{text}<extra></extra>" : `%{y:.4g} ${line.size} at %{x:.5g} ${line.time}<extra></extra>`, line: { shape: "hv", color: skin.curve, width: 1 }, fill: "tozeroy", fillcolor: skin.colour === "dark" ? "rgba(180,192,202,.18)" : "rgba(61,74,85,.16)" });
      if (line.band !== null) traces.push({ type: "scatter", mode: "lines", x: [line.x[0], line.x[line.x.length - 1]], y: [line.band, line.band], line: { color: skin.curve, width: 1, dash: "dot" }, fill: "tozeroy", fillcolor: skin.colour === "dark" ? "rgba(180,192,202,.35)" : "rgba(61,74,85,.32)", hoverinfo: "text", hovertext: line.band_name });
      if (line.limit !== null) traces.push({ type: "scatter", mode: "lines", x: [line.x[0], line.x[line.x.length - 1]], y: [line.limit, line.limit], line: { color: skin.limit, dash: "dash", width: 1.5 }, hoverinfo: "text", hovertext: line.limit_name });
      traces.push({ type: "scatter", mode: "markers", x: [line.peak.x], y: [line.peak.y], hovertext: [escaped(line.peak.text)], hoverinfo: "text", marker: { size: 11, symbol: "diamond-open", color: skin.limit, line: { width: 2 } } });
      const notes = [{ x: line.peak.x, y: line.peak.y, text: narrow() ? "peak step" : `peak: ${escaped(line.peak.name)}`, showarrow: true, ax: line.peak.late ? -36 : 36, ay: 34, xanchor: line.peak.late ? "right" : "left", font: { size: 11, color: skin.ink }, bgcolor: skin.ground, arrowcolor: skin.limit }];
      if (line.limit !== null) notes.push({ x: 1, xref: "paper", y: line.limit, yanchor: "bottom", xanchor: "right", showarrow: false, text: line.limit_name, font: { size: 11, color: skin.limit } });
      if (line.band !== null) notes.push({ x: 0, xref: "paper", y: line.band / 2, yanchor: "middle", xanchor: "left", showarrow: false, text: line.band_name, font: { size: 11, color: skin.ink } });
      div.dataset.axes = "xaxis";
      div.whole = { xaxis: [line.x[0], line.x[line.x.length - 1]] };
      return window.Plotly.react(div, traces, layout({
        barmode: "overlay", bargap: 0.12, annotations: notes, uirevision: "kept",
        xaxis: axis({ title: { text: line.x_name, standoff: 4 }, range: div.whole.xaxis, minallowed: line.x[0], maxallowed: line.x[line.x.length - 1] }),
        yaxis: axis({ title: { text: `RAM [${line.size}]`, standoff: 4 }, rangemode: "tozero", range: [0, line.top], domain: lanes ? [0, 0.6] : [0, 1], fixedrange: true }),
        ...(lanes ? { yaxis2: axis({ type: "category", categoryorder: "array", categoryarray: line.lanes, autorange: "reversed", domain: [0.66, 1], fixedrange: true, showgrid: false }) } : {}),
      }), config()).then(() => {
        if (div.dataset.ready) return;
        div.dataset.ready = "yes";
        const tell = (event) => {
          const point = event.points[0];
          const text = point.hovertext || point.text || `${Number(point.y).toPrecision(5)} ${line.size} at ${Number(point.x).toPrecision(5)} ${line.time}`;
          say(id, String(text).replace(/&lt;/g, "<").replace(/&amp;/g, "&"));
        };
        div.on("plotly_hover", tell);
        div.on("plotly_click", tell);
        const points = lanes ? order.length : line.x.length;
        onKeys(div, (key) => {
          const step = { ArrowLeft: -1, ArrowRight: 1, Home: -points, End: points, PageUp: -10, PageDown: 10 }[key];
          if (!step) return false;
          cursor = Math.min(points - 1, Math.max(0, cursor + step));
          const bar = lanes ? line.bars[order[cursor]] : [0, 0, line.x[cursor], 0, line.texts[cursor]];
          say(id, bar[4]);
          window.Plotly.relayout(div, { shapes: [{ type: "rect", xref: "x", yref: "paper", x0: bar[2], x1: bar[2] + bar[3], y0: 0, y1: 1, fillcolor: skin.limit, opacity: 0.35, line: { color: skin.limit, width: 1 } }] });
          return true;
        });
      });
    };
    return draw;
  };

  // -- addresses against time ------------------------------------------------------------------
  const addressesOf = (id, map) => {
    const div = $(id);
    let cursor = -1;
    const draw = () => {
      const least = 0.002 * map.end;
      const traces = [];
      data.kinds.forEach((found, kind) => {
        const boxes = map.boxes.filter((box) => box[0] === kind);
        if (!boxes.length) return;
        traces.push({
          type: "bar", x: boxes.map((box) => box[1] + box[2] / 2), width: boxes.map((box) => box[2]), base: boxes.map((box) => box[3]), y: boxes.map((box) => box[4]),
          hovertext: boxes.map((box) => escaped(box[5])), hoverinfo: "text", name: found.name, textposition: "none",
          marker: { color: colour(kind), line: { width: 0.5, color: boxes.map((box) => (box[2] < least ? colour(kind) : skin.ground)) } },
        });
      });
      traces.push({ type: "scatter", mode: "lines", x: [0, map.end], y: [map.limit, map.limit], line: { color: skin.limit, dash: "dash", width: 1.5 }, hoverinfo: "text", hovertext: map.limit_name });
      div.dataset.axes = "xaxis yaxis";
      div.whole = { xaxis: [0, map.end], yaxis: [0, 1.05 * map.limit || 1] };
      return window.Plotly.react(div, traces, layout({
        barmode: "overlay", uirevision: "kept",
        xaxis: axis({ title: { text: map.x_name, standoff: 4 }, range: div.whole.xaxis, minallowed: 0, maxallowed: map.end }),
        yaxis: axis({ title: { text: map.y_name, standoff: 4 }, range: div.whole.yaxis }),
      }), config()).then(() => {
        if (div.dataset.ready) return;
        div.dataset.ready = "yes";
        const tell = (event) => say(id, String(event.points[0].hovertext || "").replace(/&lt;/g, "<").replace(/&amp;/g, "&"));
        div.on("plotly_hover", tell);
        div.on("plotly_click", tell);
        onKeys(div, (key) => {
          const step = { ArrowLeft: -1, ArrowRight: 1, Home: -map.boxes.length, End: map.boxes.length, PageUp: -10, PageDown: 10 }[key];
          if (!step || !map.boxes.length) return false;
          cursor = Math.min(map.boxes.length - 1, Math.max(0, cursor + step));
          const [, start, length, low, height, text] = map.boxes[cursor];
          say(id, text);
          window.Plotly.relayout(div, { shapes: [{ type: "rect", x0: start, x1: start + length, y0: low, y1: low + height, line: { color: skin.limit, width: 3 } }] });
          return true;
        });
      });
    };
    return draw;
  };

  // -- the Pareto chart ------------------------------------------------------------------------
  const frontOf = (id, front) => {
    const div = $(id);
    const draw = () => {
      const traces = front.lines.map((line, at) => ({
        type: "scatter", mode: "lines+markers", name: escaped(line.name), x: line.x, y: line.y, hovertext: line.texts.map(escaped), hoverinfo: "text",
        line: { color: front.colours[at % front.colours.length][skin.colour], width: 1, dash: at < front.colours.length ? "solid" : "dot" },
        marker: { size: 9, symbol: line.proven.map((proven) => SYMBOLS[at % SYMBOLS.length] + (proven ? "" : "-open")) },
      }));
      traces.push({ type: "scatter", mode: "lines", name: "front of energy and RAM", x: front.front.x, y: front.front.y, line: { shape: "hv", color: skin.faint, dash: "dash", width: 1.5 }, hoverinfo: "skip" });
      for (const here of front.here) traces.push({ type: "scatter", mode: "markers+text", name: `schedule ${here.name}`, x: [here.x], y: [here.y], text: [here.name], textposition: "top center", hovertext: [here.text], hoverinfo: "text", marker: { size: 15, symbol: "circle-open", color: skin.limit, line: { width: 2 } } });
      div.dataset.axes = "xaxis yaxis";
      return window.Plotly.react(div, traces, layout({
        showlegend: true, legend: { orientation: "h", y: -0.22 }, uirevision: "kept",
        xaxis: axis({ title: { text: `peak RAM [${front.size}]`, standoff: 4 } }), yaxis: axis({ title: { text: "energy overhead [% of the baseline]", standoff: 4 }, ...(front.log ? { type: "log" } : { rangemode: "tozero" }) }),
      }), config()).then(() => {
        if (div.dataset.ready) return;
        div.dataset.ready = "yes";
        const points = front.lines.flatMap((line) => line.texts.map((text, at) => [text, line.x[at], line.y[at]]));
        let cursor = -1;
        div.on("plotly_hover", (event) => say(id, String(event.points[0].hovertext || "").replace(/&lt;/g, "<").replace(/&amp;/g, "&")));
        onKeys(div, (key) => {
          const step = { ArrowLeft: -1, ArrowRight: 1, Home: -points.length, End: points.length }[key];
          if (!step || !points.length) return false;
          cursor = Math.min(points.length - 1, Math.max(0, cursor + step));
          const [text, x, y] = points[cursor];
          say(id, text);
          window.Plotly.relayout(div, { annotations: [{ x, y: front.log ? Math.log10(y) : y, text: "", showarrow: true, ax: 0, ay: -30, arrowcolor: skin.limit, arrowwidth: 2 }] });
          return true;
        });
      });
    };
    return draw;
  };

  // -- plotly is packed: unpack it, then draw each chart when it comes near the window ----------
  const makers = { map: mapOf, time: timelineOf, addresses: addressesOf, front: frontOf };
  let charts = [];
  const drawAll = async () => {
    for (const chart of charts) if (chart.drawn) await chart.draw();
  };
  const watch = () => {
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) {
        const chart = charts.find((one) => one.div === entry.target);
        near.unobserve(entry.target);
        if (!chart.drawn) { chart.drawn = true; chart.draw(); }
      }
    }, { rootMargin: "400px" });
    charts.forEach((chart) => near.observe(chart.div));
  };
  const unpack = async () => {
    const packed = atob($("plotly").textContent.trim());
    const bytes = new Uint8Array(packed.length);
    for (let at = 0; at < packed.length; at += 1) bytes[at] = packed.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };
  const start = async () => {
    try {
      await unpack();
      charts = data.charts.map((chart) => ({ div: $(chart.id), drawn: false, draw: makers[chart.type](chart.id, chart) }));
      watch();
      root.dataset.ready = String(Math.round(performance.now()));
    } catch (error) {
      document.querySelectorAll(".chart").forEach((div) => { div.textContent = "The charts need a browser of 2023 or later; all figures are in the tables."; });
      throw error;
    }
  };
  window.addEventListener("beforeprint", () => { skin = SKINS.light; onPaper = true; charts.forEach((chart) => { chart.drawn = true; }); drawAll(); });
  window.addEventListener("afterprint", () => { onPaper = false; skin = SKINS[root.dataset.theme]; drawAll(); });
  const soon = window.requestIdleCallback || ((job) => setTimeout(job, 200));
  window.addEventListener("load", () => soon(start, { timeout: 1500 }));
})();
