// RAM over time: a band for the lifetime of each copy of a tensor and each workspace; core and bus
// above; the budget; the RAM of keep-all in the background. Values: poetmodel.report.timeline.
page.define("timeline", (chart, line) => {
  const { graph } = page;  // the graph of these data, even if the page has another one now
  const { div } = chart;
  const panel = page.$(`${div.id}-alive`);
  const n = line.ops.length;
  const WORDS = { c: "compute", a: "recompute", r: "read", i: "page in", o: "page out", w: "wait for", f: "free" };
  const LANES = { c: ["core", "computed"], a: ["core", "recomputed"], w: ["core", "stall"], r: ["bus", "paged_in"], i: ["bus", "paged_in"], o: ["bus", "paged_out"] };
  const RECOMPUTED = 1, PAGED_IN = 2, RESIDENT = 3;
  const MOST = 30;  // maximum rows of the list while nothing is pinned

  const { timed, starts, last, levels, first, edges, bytesAt, bands, heightAt, alive, height } = makeBands(line, graph, chart.counted);
  const parts = page.data.parts;
  const above = line.budget !== null && line.budget > 2.2 * height;  // a budget far above the chart is only named
  const top = 1.12 * Math.max(height, above ? 0 : line.budget || 0);

  // -- texts -----------------------------------------------------------------------------------
  const { make, size } = page;
  const node = (k) => graph.nodes[k];
  const isReserved = (what) => what < -graph.nodes.length;
  const nameOf = (what) => (isReserved(what) ? "reserved" : what < 0 ? `${node(-1 - what)}` : graph.tensors[what][0]);
  const subject = (p) => ("ca".includes(line.ops[p]) ? node(line.of[p]) : graph.tensors[line.of[p]][0]);
  const clock = (x) => {
    if (!x) return "0\u00a0s";
    const seconds = x * { s: 1, ms: 1e-3, us: 1e-6 }[line.unit];
    const [unit, factor] = [["s", 1], ["ms", 1e-3], ["us", 1e-6]].find((found) => seconds >= found[1]) || ["us", 1e-6];
    return `${Number((seconds / factor).toPrecision(4))}\u00a0${unit}`;
  };
  const when = (p) => (line.issued === null || p >= n ? `#${p}` : clock(line.issued[Math.max(p, 0)]));
  const arrival = (band) => [`computed at ${when(band.begin)}`, `recomputed at ${when(band.begin)}`, `paged in at ${when(band.begin)}`, "resident"][band.origin];
  const why = (band, p) => {
    if (isReserved(band.what)) return "state, inputs and results that the step always holds";
    if (band.what < 0) return "workspace of this step";
    const came = arrival(band);
    if (band.reads.includes(p) && "ca".includes(line.ops[p])) return `${came}, read now`;
    const next = band.reads.find((read) => read > p);
    if (next !== undefined) return `${came}, kept for ${node(line.of[next])} at ${when(next)}`;
    return `${came}${band.reads.length ? ", not read again" : ""}`;
  };
  const goes = (band) => {
    if (band.what < 0 && !isReserved(band.what)) return "goes with it";
    if (band.end >= n) return band.replaced >= 0 ? "updated in place, stays" : "stays to the end";
    if (band.givenAt >= 0) return `${node(line.of[band.givenAt])} writes over it at ${when(band.givenAt)}`;
    return `${band.stored ? "paged out, goes" : "goes"} at ${when(band.end)}`;
  };
  const describeCopy = (band) => {  // text about a copy from its begin to its end
    const { reads } = band, last = reads[reads.length - 1];
    const read = reads.length > 1 ? `, read ${reads.length} times until ${node(line.of[last])}` : reads.length ? `, read by ${node(line.of[last])}` : "";
    return `${arrival(band)}${read}${reads.length ? ` at ${when(last)}` : ""}; ${goes(band)}`;
  };
  const headline = (l) => {
    const p = l >> 1;
    if (!n) return "";
    const words = `${l % 2 ? "after " : ""}${WORDS[line.ops[p]]} ${subject(p)}`;
    const time = line.issued === null ? "" : `${clock(starts[l] > last || !timed ? line.issued[p] : starts[l])}, `;
    return `${time}instruction ${p}: ${words}`;
  };
  const ghostAt = (p) => {
    let found = null;
    for (let k = 0; k < line.ghost[0].length && line.ghost[0][k] <= p; k += 1) found = line.ghost[1][k];
    return found;
  };

  // -- the panel: contents of RAM at a level -----------------------------------------------------
  const colourOf = (band) => parts[band.part][page.skin.colour];
  const kindColour = (key) => page.data.kinds.find((kind) => kind.key === key)[page.skin.colour];
  const stripe = (band) => ({ [RECOMPUTED]: kindColour("recomputed"), [PAGED_IN]: kindColour("paged_in") }[band.origin]);
  const swatch = (band) => {
    const over = stripe(band), under = colourOf(band);
    return over ? `repeating-linear-gradient(135deg, ${under} 0 3px, ${over} 3px 6px)` : under;
  };
  const entry = (band, l) => {
    const item = make("li");
    const button = make(band.what < 0 ? "div" : "button");
    if (band.what >= 0) {
      button.type = "button";
      button.addEventListener("click", () => page.select(page.selected === band.what ? null : band.what));
      button.setAttribute("aria-pressed", String(page.selected === band.what));
    }
    const mark = make("i");
    mark.style.background = swatch(band);
    const bytes = heightAt(band, l);
    item.dataset.what = band.what;
    item.dataset.bytes = bytes;
    button.append(mark, make("b", "", nameOf(band.what)), make("span", "n", size(bytes)), make("small", "", `${why(band, l >> 1)}; ${goes(band)}`));
    item.append(button);
    return item;
  };
  const hasSelected = () => page.selected !== null && graph === page.graph;
  const isSelected = (band) => hasSelected() && (band.what === page.selected || band.replaced === page.selected);
  const story = (l) => {  // the copies of the selected tensor in order
    const own = bands.filter(isSelected), item = make("div", "chosen");
    const [name, bytes] = graph.tensors[page.selected];
    const head = make("p");
    head.append(make("b", "", name), make("span", "n", size(bytes)));
    const clear = make("button", "", "\u00d7");
    clear.type = "button";
    clear.setAttribute("aria-label", `Light ${name} no longer`);
    clear.addEventListener("click", () => page.select(null));
    head.append(clear);
    const list = make("ol");
    own.forEach((band, k) => {
      const now = band.from <= l && l < band.to;
      const line = make("li", now ? "now-here" : "", describeCopy(band));
      if (k && own[k - 1].stored) list.append(make("li", "away", "on storage in between"));
      list.append(line);
    });
    if (!own.length) list.append(make("li", "away", "never takes RAM of its own"));
    item.append(head, list);
    return item;
  };
  const fill = (l) => {
    chart.say(headline(l));
    if (!panel) return;
    const bytes = bytesAt(l), there = alive(l).sort((a, b) => heightAt(b, l) - heightAt(a, l));
    const kept = ghostAt(l >> 1);
    panel.dataset.level = l;
    panel.dataset.bytes = bytes;
    const share = line.budget ? `, ${(100 * bytes / line.budget).toPrecision(3)} % of the budget` : "";
    const total = make("p", "total");
    total.append(make("b", "", size(bytes)), `${share}${kept === null ? "" : `; keep-all ${size(kept)} here`}`);
    const keys = make("ul", "keys");
    parts.forEach((part, k) => {
      const sum = there.reduce((found, band) => found + (band.part === k ? heightAt(band, l) : 0), 0);
      if (!sum) return;
      const key = make("li"), mark = make("i");
      mark.style.background = part[page.skin.colour];
      key.append(mark, `${part.name} `, make("b", "", size(sum)));
      keys.append(key);
    });
    const list = make("ul", "stays");
    const shown = chart.pinned ? there : there.slice(0, MOST);
    list.append(...shown.map((band) => entry(band, l)));
    if (shown.length < there.length) {
      const rest = there.slice(MOST).reduce((sum, band) => sum + heightAt(band, l), 0);
      const more = make("li", "more", `and ${there.length - MOST} smaller ones, ${size(rest)}; click to see all`);
      more.dataset.bytes = rest;
      list.append(more);
    }
    const hint = make("p", "hint", chart.pinned ? "Pinned: click there again or press Escape. " : `${page.coarse ? "Tap" : "Click"} the chart to pin. `);
    if (line.issued !== null) {
      const turn = make("button", "", timed ? "Show by instruction" : "Show by time");
      turn.type = "button";
      turn.addEventListener("click", () => { chart.counted = timed; page.replace(chart.id, line); });
      hint.append(turn);
    }
    const chosen = hasSelected() ? [story(l)] : [];
    panel.querySelector(".more-of-it").replaceChildren(total, keys, ...chosen, list, hint);
    panel.classList.toggle("pinned", Boolean(chart.pinned));
  };

  // -- overlay: names on bands, highlights, and the cursor ---------------------------------------
  const place = () => {
    const { xaxis, yaxis } = div._fullLayout;
    return {
      left: xaxis._offset, width: xaxis._length, low: yaxis._offset, height: yaxis._length, top: 34,
      x: (value) => xaxis._offset + xaxis.l2p(value), y: (bytes) => yaxis._offset + yaxis.l2p(bytes / line.scale),
    };
  };
  const outline = (band, at) => {
    const up = [], down = [];
    for (const [v0, v1, low, high] of band.runs) {
      const x0 = at.x(edges[v0]).toFixed(1), x1 = at.x(edges[v1]).toFixed(1);
      up.push(`${x0} ${at.y(high).toFixed(1)}`, `${x1} ${at.y(high).toFixed(1)}`);
      down.unshift(`${x1} ${at.y(low).toFixed(1)}`, `${x0} ${at.y(low).toFixed(1)}`);
    }
    return up.length ? `M${up.join("L")}L${down.join("L")}Z` : "";
  };
  const names = (at) => bands.map((band) => {
    let best = null;
    for (const [v0, v1, low, high] of band.runs) {
      const x0 = Math.max(at.x(edges[v0]), at.left), x1 = Math.min(at.x(edges[v1]), at.left + at.width);
      if (!best || x1 - x0 > best.width) best = { width: x1 - x0, x: (x0 + x1) / 2, y: (at.y(low) + at.y(high)) / 2, height: at.y(low) - at.y(high) };
    }
    const name = nameOf(band.what);
    if (!best || best.height < 12 || best.width < 6.2 * name.length + 8) return "";
    return `<text x="${best.x.toFixed(1)}" y="${(best.y + 3.5).toFixed(1)}" class="on-${parts[band.part].key}">${page.escaped(name)}</text>`;
  }).join("");
  const tip = (at) => {  // tooltip of the band below the pointer
    if (!chart.under) return "";
    const { band, x, y } = chart.under;
    const words = `${nameOf(band.what)}${band.what < 0 && !isReserved(band.what) ? " workspace" : ""}, ${size(band.bytes)}`;
    const right = x + 7.5 * words.length > at.left + at.width;
    return `<path class="under" d="${outline(band, at)}"/><text class="tip" x="${(x + (right ? -8 : 8)).toFixed(1)}" y="${(y - 7).toFixed(1)}" style="text-anchor: ${right ? "end" : "start"}">${page.escaped(words)}</text>`;
  };
  const cursor = (at, l) => {
    if (l === null || !n) return "";
    const x = Math.min(Math.max(at.x(starts[l]), at.left), at.left + at.width).toFixed(1);
    const end = Math.min(at.x(starts[l + 1]), at.left + at.width);
    const wide = end - x > 1 ? `<rect class="now" x="${x}" y="${at.top}" width="${(end - x).toFixed(1)}" height="${at.low + at.height - at.top}"/>` : "";
    return `${wide}<path class="cursor${chart.pinned ? " pinned" : ""}" d="M${x} ${at.top}V${at.low + at.height}"/><circle cx="${x}" cy="${at.y(bytesAt(l)).toFixed(1)}" r="4"/>${tip(at)}`;
  };
  const paint = (what) => {
    const svg = div.querySelector(":scope > svg.over");
    if (!svg || !div._fullLayout) return;
    const at = place();
    const set = (name, content) => { svg.querySelector(`.${name}`).innerHTML = content; };
    if (what !== "cursor") {
      svg.setAttribute("width", div.clientWidth);
      svg.setAttribute("height", div.clientHeight);
      svg.querySelector("clipPath").innerHTML = `<rect x="${at.left}" y="${at.top}" width="${at.width}" height="${at.low + at.height - at.top}"/>`;
      set("names", names(at));
      const paths = bands.filter(isSelected).map((band) => outline(band, at)).join("");
      const whole = page.selected === null ? "" : outline({ runs: levels.map((l, v) => [v, v + 1, 0, bytesAt(l)]) }, at);
      set("lit", whole && `<path class="dim" fill-rule="evenodd" d="${whole}${paths}"/><path class="rim" d="${paths}"/>`);
    }
    set("hand", cursor(at, chart.level ?? null));
  };
  const over = () => {
    if (!div.querySelector(":scope > svg.over")) {
      const clip = `${div.id}-clip`;
      div.insertAdjacentHTML("beforeend", `<svg class="over" aria-hidden="true"><clipPath id="${clip}"></clipPath><g clip-path="url(#${clip})"><g class="names"></g><g class="lit"></g><g class="hand"></g></g></svg>`);
    }
  };

  // -- pointer -----------------------------------------------------------------------------------
  const peak = 2 * line.peak;
  const firstOf = (k) => line.of.findIndex((found, p) => found === k && line.ops[p] === "c");
  const lastFirst = (p) => { while (p > 0 && line.ops[p] !== "c") p -= 1; return line.of[p]; };
  const show = (l) => {
    if (!n) return;
    chart.level = page.within(l, 2 * n - 1);
    chart.anchor = chart.rest === undefined ? undefined : lastFirst(chart.rest >> 1);
    fill(chart.level);
    paint("cursor");
  };
  const levelAt = (x) => {  // the last level that takes time and begins at or before x
    return levels.length ? levels[page.lastUpTo(x, levels.length, (v) => edges[v])] : peak;
  };
  const pointed = (event) => {
    if (!div._fullLayout) return null;
    const box = div.getBoundingClientRect(), at = place();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    if (x < at.left - 2 || x > at.left + at.width + 2 || y < at.top || y > at.low + at.height) return null;
    const { xaxis, yaxis } = div._fullLayout;
    return { level: levelAt(xaxis.p2l(x - at.left)), time: xaxis.p2l(x - at.left), bytes: y < at.low ? null : yaxis.p2l(y - at.low) * line.scale, x, y };
  };
  const bandAt = (spot) => {
    const v = first[spot.level];
    return spot.bytes === null ? undefined : bands.find((band) => band.runs.some(([v0, v1, low, high]) => v0 <= v && v < v1 && low <= spot.bytes && spot.bytes < high));
  };
  const laneAt = (spot) => {  // the transfer below the pointer, in the lanes
    if (spot.bytes !== null || !timed) return undefined;
    const { yaxis2 } = div._fullLayout;
    const lane = lanes[Math.round(yaxis2.p2l(spot.y - yaxis2._offset))];
    return line.work.find(([p, start, end]) => LANES[line.ops[p]][0] === lane && start <= spot.time && spot.time <= end);
  };
  const leave = () => {
    chart.under = null;
    if (chart.pinned) paint("cursor"); else show(chart.rest ?? peak);
  };
  const move = (event) => {
    if (event.buttons) return;
    const spot = pointed(event), band = spot && event.pointerType === "mouse" ? bandAt(spot) : undefined;
    if (!spot) { leave(); return; }
    chart.under = band ? { band, x: spot.x, y: spot.y } : null;
    if (chart.pinned) paint("cursor"); else show(spot.level);
  };
  const press = (event) => {
    const spot = pointed(event);
    if (!spot) return;
    const again = chart.pinned && spot.level === chart.level;
    chart.pinned = !again;
    chart.rest = spot.level;
    show(spot.level);
    const band = bandAt(spot), work = laneAt(spot);
    if (again) return;
    if (band && band.what >= 0) page.select(band.what);
    else if (work && !"caw".includes(line.ops[work[0]])) page.select(line.of[work[0]]);
  };
  const free = () => { chart.pinned = false; chart.rest = undefined; show(peak); };
  const key = (name) => {
    const step = page.step(name, n);
    if (name === "Enter" || name === " ") { chart.pinned = !chart.pinned; show(chart.level ?? peak); return true; }
    if (name === "ArrowUp" || name === "ArrowDown") {
      const there = alive(chart.level ?? peak).filter((band) => band.what >= 0);
      if (!there.length) return true;
      const now = there.findIndex((band) => band.what === page.selected);
      page.select(there[(now + (name === "ArrowUp" ? 1 : now < 0 ? 0 : -1) + there.length) % there.length].what);
      return true;
    }
    if (!step || !n) return false;
    const before = chart.rest === undefined ? -1 : chart.rest >> 1;
    chart.rest = 2 * page.within(before + step, n - 1);
    show(chart.rest);
    return true;
  };
  const listen = () => {
    div.timeline = { move, press, leave, free, paint };
    if (div.dataset.timeline) return;
    div.dataset.timeline = "yes";
    let down = null, moved = null;
    div.addEventListener("pointermove", (event) => {  // at most once per frame
      if (!moved) window.requestAnimationFrame(() => { if (moved) div.timeline.move(moved); moved = null; });
      moved = event;
    });
    div.addEventListener("pointerleave", () => { moved = null; div.timeline.leave(); });
    div.addEventListener("pointerdown", (event) => { down = event.button ? null : event; });
    window.addEventListener("pointerup", (event) => {
      if (down && Math.hypot(event.clientX - down.clientX, event.clientY - down.clientY) < 5 && !down.target.closest(".modebar")) div.timeline.press(event);
      down = null;
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") div.timeline.free(); });
    div.on("plotly_afterplot", () => div.timeline.paint());
  };

  // -- the chart -------------------------------------------------------------------------------
  const lanes = timed ? ["core", "bus"] : [];  // both, so that the layout is stable when a budget adds the first transfer
  const bars = () => {  // one trace for all bars of a kind; an outline keeps narrow bars visible
    const least = 0.0015 * (last || 1);
    return page.data.kinds.flatMap((kind, number) => [true, false].flatMap((wide) => {
      const found = line.work.filter(([p, start, end]) => LANES[line.ops[p]][1] === kind.key && (end - start >= least) === wide);
      if (!timed || !found.length) return [];
      const own = page.colour(number), x = [], y = [];
      for (const [p, start, end] of found) {
        const low = lanes.indexOf(LANES[line.ops[p]][0]) + 0.43, high = low - 0.86;
        x.push(start, start, end, end, start, null);
        y.push(low, high, high, low, low, null);
      }
      return [{
        type: "scatter", mode: "lines", yaxis: "y2", hoverinfo: "skip", x, y, fill: "toself", fillcolor: own, line: { width: 0.5, color: wide ? page.skin.ground : own },
        fillpattern: kind.key === "stall" ? { shape: "/", fillmode: "replace", bgcolor: own, fgcolor: page.skin.ground, fgopacity: 0.6, size: 6, solidity: 0.25 } : undefined,
      }];
    }));
  };
  const areas = () => {  // one trace for all bands of a part and an origin; small bands have no outline
    const groups = new Map();
    for (const band of bands) {
      if (!band.runs.length) continue;
      const tall = band.runs.some((run) => run[3] - run[2] > 0.012 * top);
      const striped = stripe(band) ? band.origin : 0;
      const id = `${band.part} ${striped} ${tall}`;
      if (!groups.has(id)) groups.set(id, { band, tall, x: [], y: [] });
      const { x, y } = groups.get(id);
      for (const [v0, v1, , high] of band.runs) { x.push(edges[v0], edges[v1]); y.push(high / line.scale, high / line.scale); }
      for (let k = band.runs.length - 1; k >= 0; k -= 1) {
        const [v0, v1, low] = band.runs[k];
        x.push(edges[v1], edges[v0]);
        y.push(low / line.scale, low / line.scale);
      }
      x.push(edges[band.runs[0][0]], null);
      y.push(band.runs[0][3] / line.scale, null);
    }
    return [...groups.values()].map(({ band, tall, x, y }) => ({
      type: "scatter", mode: "lines", x, y, fill: "toself", hoverinfo: "skip", fillcolor: colourOf(band),
      line: { width: tall ? 0.7 : 0, color: page.skin.colour === "dark" ? "rgba(18,23,28,.7)" : "rgba(255,255,255,.85)" },
      fillpattern: stripe(band) ? { shape: "/", fillmode: "replace", bgcolor: colourOf(band), fgcolor: stripe(band), size: 7, solidity: 0.42 } : undefined,
    }));
  };
  const ghost = () => {
    const x = [0, ...line.ghost[0].map((p) => starts[2 * p]), last];
    const y = [line.ghost[1][0] || 0, ...line.ghost[1], line.ghost[1][line.ghost[1].length - 1] || 0].map((bytes) => bytes / line.scale);
    return { type: "scatter", mode: "lines", x, y, hoverinfo: "skip", line: { shape: "hv", color: page.skin.faint, width: 1.2, dash: "dot" }, fill: "tozeroy", fillcolor: page.skin.colour === "dark" ? "rgba(159,173,185,.13)" : "rgba(86,99,112,.09)" };
  };
  const total = () => ({
    type: "scatter", mode: "lines", hoverinfo: "skip", x: edges, y: [...levels.map(bytesAt), levels.length ? bytesAt(levels[levels.length - 1]) : 0].map((bytes) => bytes / line.scale),
    line: { shape: "hv", color: page.skin.curve, width: bands.length ? 1 : 1.2 }, ...(bands.length ? {} : { fill: "tozeroy", fillcolor: page.skin.colour === "dark" ? "rgba(180,192,202,.18)" : "rgba(61,74,85,.16)" }),
  });
  const notes = () => {
    const found = [];
    const text = (extra) => found.push({ showarrow: false, font: { size: 11, color: page.skin.faint }, ...extra });
    const most = Math.max(0, ...line.ghost[1]), p = line.ghost[0][line.ghost[1].indexOf(most)] || 0;
    const x = starts[2 * p], share = last ? x / last : 0;
    if (most) text({ x, y: most / line.scale, text: `${line.ghost_name || "keep-all"} ${size(most)}`, yanchor: "bottom", xanchor: share > 0.75 ? "right" : share < 0.25 ? "left" : "center" });
    const side = share > 0.6 ? { x: 0, xanchor: "left" } : { x: 1, xanchor: "right" };
    if (line.budget !== null) text({ ...side, xref: "paper", yref: above ? "y domain" : "y", y: above ? 1 : line.budget / line.scale, yanchor: above ? "top" : "bottom", text: `${above ? "\u2191 " : ""}${line.budget_name}`, font: { size: 11, color: page.skin.limit }, bgcolor: page.skin.colour === "dark" ? "rgba(18,23,28,.6)" : "rgba(255,255,255,.7)", borderpad: 0 });
    return found;
  };
  const draw = async () => {
    const traces = [ghost(), ...areas(), total(), ...bars()];
    if (line.budget !== null && !above) traces.push({ type: "scatter", mode: "lines", x: [0, last], y: [line.budget, line.budget].map((bytes) => bytes / line.scale), line: { color: page.skin.limit, dash: "dash", width: 1.5 }, hoverinfo: "skip" });
    if (n) traces.push({ type: "scatter", mode: "markers", x: [starts[peak]], y: [bytesAt(peak) / line.scale], hoverinfo: "skip", marker: { size: 9, symbol: "diamond-open", color: page.skin.limit, line: { width: 2 } } });
    div.dataset.axes = "xaxis";
    div.whole = { xaxis: [0, last || 1] };
    chart.under = null;
    await window.Plotly.react(div, traces, page.layout({
      annotations: notes(), uirevision: timed ? "time" : "count", hovermode: false,
      xaxis: page.axis({ title: { text: timed ? `time [${line.unit}]` : "instruction", standoff: 4 }, range: div.whole.xaxis, minallowed: 0, maxallowed: last || 1, showgrid: false, zeroline: false }),
      yaxis: page.axis({ title: { text: `RAM [${line.size}]`, standoff: 4 }, range: [0, top / line.scale], domain: lanes.length ? [0, 0.8] : [0, 1], fixedrange: true, zeroline: false }),
      ...(lanes.length ? { yaxis2: page.axis({ tickvals: lanes.map((_, k) => k), ticktext: lanes, range: [lanes.length - 0.5, -0.5], domain: [0.84, 1], fixedrange: true, showgrid: false, zeroline: false }) } : {}),
    }), page.config());
    over();
    listen();
    keys();
    if (chart.line !== line && chart.anchor !== undefined) chart.rest = 2 * Math.max(0, firstOf(chart.anchor));  // new values: stay at the same node
    chart.line = line;
    show(chart.rest ?? peak);
    paint();
  };
  const keys = () => {  // the legend lists only existing items
    const there = new Set(["keep_all"]);
    for (const band of bands) { there.add(parts[band.part].key); if (stripe(band)) there.add(["", "again", "back"][band.origin]); }
    if (timed) for (const [p] of line.work) there.add(LANES[line.ops[p]][1]);
    if (line.budget !== null) there.add("budget");
    const legend = page.$(`${div.id}-keys`);
    if (legend) for (const key of legend.children) key.hidden = !there.has(key.dataset.about);
  };
  const light = () => { paint(); if (chart.level !== undefined) fill(chart.level); };
  return { draw, key, light };
});
