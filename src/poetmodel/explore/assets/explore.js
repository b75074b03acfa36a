// The explorer: sends the requested limits to the server, and shows the points that it returns.
//
// A request (`wished`) is a problem, a RAM budget and a deadline. The server returns a point at once,
// and again after each change. `heard` stores all points; only the requested one is shown. The charts
// of a point are fetched by its id and revision, and drawn unless the request has changed meanwhile.
(() => {
  const { $ } = page;
  const root = document.documentElement;
  const PACE_MS = 80;
  const CALM_MS = 250;
  const RETRY_MS = 1000;
  const KEPT = 80;
  const CHARTS = JSON.parse($("answer").dataset.charts);

  let choice = null;
  let problem = null;
  let wished = { ram_bytes: null, deadline_s: null };
  const points = new Map();

  // -- the session: a reload continues it, each tab has its own --------------------------------
  const [visit] = performance.getEntriesByType("navigation");
  const before = visit && visit.type === "reload" ? window.sessionStorage.getItem("session") : null;
  const session = before || Array.from(window.crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join("");
  window.sessionStorage.setItem("session", session);

  // The connection to the server; after a reconnection the request is repeated.
  const { ask, showError, listen, sentence, Refused } = makeServer(session, {
    heard: (point) => heard(point),
    gone: () => enter(),
    again: () => { if (!choice) { begin(); return; } listen(); enter(); },
  });

  // -- the address: a link or a reload shows the same view -------------------------------------
  const sizeText = (bytes) => (bytes % 1024 ? String(bytes) : `${bytes / 1024}KiB`);
  const writeAddress = () => {
    const query = new URLSearchParams(choices.stated(choice));
    if (wished.ram_bytes !== null) query.set("ram", sizeText(wished.ram_bytes));
    if (wished.deadline_s !== null) query.set("deadline", `${wished.deadline_s}s`);
    const found = `?${query}`;
    if (found !== window.location.search) window.history.replaceState(null, "", window.location.pathname + found + window.location.hash);
  };
  let stated = null;  // limits in the address, until the problem is loaded to which 50% refers
  const readAddress = (initial) => {
    const query = new URLSearchParams(window.location.search);
    choice = choices.read(query, initial);
    wished = { ram_bytes: initial.ram_bytes ?? null, deadline_s: initial.deadline_s ?? null };
    stated = { ram: query.get("ram"), deadline: query.get("deadline") };
  };

  // -- the problem: its controls, and its facts from the server --------------------------------
  const readChoice = (event) => {
    const found = choices.changed(choice, event.target);
    if (found) takeChoice(found);
  };
  const takeChoice = (found) => {
    choice = found;
    choices.show(choice);
    enter();
  };
  let entering = 0;
  const enter = async () => {
    entering += 1;
    const turn = entering;
    $("problem").setAttribute("aria-busy", "true");
    let found;
    try {
      found = await (await ask("/api/problems", { body: choice })).json();
    } catch (error) {
      if (turn === entering) { $("problem").removeAttribute("aria-busy"); showError(error, "problem-error"); }
      return;
    }
    if (turn !== entering) return;
    $("problem").removeAttribute("aria-busy");
    $("problem-error").textContent = "";
    if (problem && problem.problem === found.problem) found.graph = problem.graph;
    else points.clear();
    problem = found;
    for (const point of found.points) keep(point);
    document.title = `${found.title}: poetmodel explore`;
    $("title").textContent = found.title;
    setLimits();
    await page.ready;
    drawPoints();
    want();
  };
  const setLimits = () => {
    const { floor_bytes, keep_all_bytes, device_ram_bytes, deadline } = problem;
    const near = device_ram_bytes && device_ram_bytes > floor_bytes && device_ram_bytes < 1.6 * keep_all_bytes;
    const high = 1.03 * Math.max(keep_all_bytes, near ? device_ram_bytes : 0, 1.1 * floor_bytes);
    const marks = [{ name: "minimum", value: floor_bytes }, { name: "keep-all", value: keep_all_bytes }, ...(device_ram_bytes ? [{ name: "device", value: device_ram_bytes }] : [])];
    const inside = (bytes) => bytes !== null && bytes >= floor_bytes / 2 && bytes <= high;
    const start = near && device_ram_bytes < keep_all_bytes ? device_ram_bytes : Math.round((floor_bytes + keep_all_bytes) / 2048) * 1024 || keep_all_bytes;
    if (stated) {
      const bytes = stated.ram && units.readBytes(stated.ram, keep_all_bytes);
      const seconds = stated.deadline && units.readSeconds(stated.deadline, deadline.single_pass_s);
      wished = { ram_bytes: bytes || wished.ram_bytes, deadline_s: seconds || wished.deadline_s };
      stated = null;
    }
    wished = { ...wished, ram_bytes: inside(wished.ram_bytes) ? wished.ram_bytes : start };
    ram.set({ marks, low: floor_bytes, high, log: high > 5 * floor_bytes }, wished.ram_bytes);
    const { min_s, single_pass_s, max_s } = deadline;
    if (wished.deadline_s !== null && (wished.deadline_s > 2 * max_s || wished.deadline_s < min_s / 2)) wished = { ...wished, deadline_s: null };
    const times = [...(min_s < 0.999 * single_pass_s ? [{ name: "least", value: min_s }] : []), { name: "single pass", value: single_pass_s }, { name: "none", value: null }];
    late.set({ marks: times, low: min_s, high: Math.max(max_s, 1.05 * min_s), log: max_s > 5 * min_s, none: true }, wished.deadline_s);
  };

  // -- requests: the newest replaces older ones ------------------------------------------------
  let timer = null;
  let writing = null;
  let asking = null;
  const isWished = (point) => problem && point.problem === problem.problem && point.ram_bytes === wished.ram_bytes && point.deadline_s === wished.deadline_s;
  const below = () => wished.ram_bytes < problem.floor_bytes;
  const want = () => {
    const known = Array.from(points.values()).find(isWished);
    if (known) show(known); else lend();
    if (timer === null) timer = setTimeout(() => send(), PACE_MS);
    drawPointsSoon();
  };
  const send = async ({ more = false } = {}) => {
    timer = null;
    clearTimeout(writing);
    writing = setTimeout(writeAddress, CALM_MS);  // browsers limit the rate of address changes
    asking?.abort();
    asking = new AbortController();
    const { signal } = asking;
    try {
      if (below()) { await explain(signal); return; }
      heard(await (await ask("/api/points", { body: { problem: problem.problem, ...wished, session, more }, signal })).json());
    } catch (error) {
      if (error instanceof Refused) fail(error.message);
    }
  };
  // Until the server answers, show the best schedule of another point that meets these limits.
  const lend = () => {
    const late_s = wished.deadline_s ?? Infinity;
    const slower = (point) => problem.deadline.counts === "overlap" && point.ram_bytes > wished.ram_bytes;
    const found = Array.from(points.values())
      .filter((point) => point.energy_j !== null && point.needs_bytes <= wished.ram_bytes && point.time_s <= late_s && !slower(point))
      .reduce((best, point) => (best && best.value <= point.value ? best : point), null);
    root.dataset.point = root.dataset.status = "";
    root.dataset.provisional = found ? "yes" : "";
    offer(null);
    $("more").hidden = true;
    if (!found) { picture(null); say("waiting", below() ? `${units.bytes(wished.ram_bytes)} is below the minimum` : `Asking for ${units.bytes(wished.ram_bytes)}`); return; }
    say("waiting", `Best known so far, from ${units.bytes(found.ram_bytes)}`);
    figures({ ...found, deadline_s: wished.deadline_s, provisional: true, gap: null, bound_j: null });
    put("solve", null, "–");
    picture(found);
  };
  const choose = (change) => { wished = { ...wished, ...change }; want(); };
  const go = (ram_bytes, deadline_s) => {
    wished = { ram_bytes, deadline_s };
    ram.move(ram_bytes);
    late.move(deadline_s);
    want();
  };

  // -- points: stored by id, older revisions are ignored ---------------------------------------
  const keep = (point) => {
    const old = points.get(point.id);
    if (old && (point.revision < old.revision || (point.revision === old.revision && point.seconds < old.seconds && old.state !== "cancelled"))) return false;
    points.set(point.id, point);
    return true;
  };
  const heard = (point) => {
    if (!problem || point.problem !== problem.problem || !keep(point)) return;
    drawPointsSoon();
    if (isWished(point)) show(point);
  };

  // -- metrics of the answer -------------------------------------------------------------------
  const say = (state, text) => { root.dataset.state = state; $("say").textContent = text; };
  const put = (id, value, text, more = "") => {
    const field = $(id);
    field.textContent = text;
    if (value === null) delete field.dataset.value;
    else field.dataset.value = value;
    $(`${id}-more`).textContent = more;
  };
  const METRICS = [...document.querySelectorAll(".figures [data-unit]")];
  const FORMATS = { B: units.bytes, s: units.seconds, J: units.joules, fraction: units.share };
  const NOTES = {
    energy_j: (point) => `${units.joules(point.overhead_j)} beyond a single pass`,
    makespan_s: (point) => (point.deadline_s === null ? "no deadline" : `deadline ${units.seconds(point.deadline_s)}`),
    peak_ram_bytes: (point) => `${units.share(point.needs_bytes / wished.ram_bytes)} of the budget`,
  };
  const figures = (point) => {
    const base_j = point.energy_j - point.overhead_j;
    const share = base_j ? point.overhead_j / base_j : 0;
    for (const { id, dataset } of METRICS) {
      const value = point[id] ?? null;
      if (value === null) put(id, null, "–");
      else put(id, value, (FORMATS[dataset.unit] ?? String)(value), NOTES[id]?.(point) ?? "");
    }
    put("overhead", share, `+${units.share(share)}`, "energy of a single pass");
    const proven = point.status === "optimal" && !point.provisional;
    const gap = point.gap === null ? "" : `gap ${units.share(point.gap)}`;
    const bound = point.bound_j === null ? "" : `no schedule below ${units.joules(point.bound_j)}`;
    put("proof", point.gap, proven ? "Optimal" : gap || "Open", [proven && gap, bound].filter(Boolean).join(", "));
  };
  // A schedule may meet its budget and still not fit the board, because of the resident bytes.
  const warn = (fit) => {
    const bad = fit !== null && fit.mood !== "good";
    $("warning").hidden = !bad;
    $("warning").textContent = bad ? `${fit.word}: ${fit.text}. ` : "";
    if (bad && problem.whole_step) $("warning").append(wholeStep(problem.whole_step));
  };
  // A click includes parameters and gradients in the plan, which are resident bytes otherwise.
  const wholeStep = ({ state, in_place, min_bytes }) => {
    const made = page.make("button", "");
    made.type = "button";
    made.id = "whole-step";
    made.textContent = `Plan the whole step (${state}, in place): at least ${units.bytes(min_bytes)}`;
    made.addEventListener("click", () => takeChoice({ ...choice, state, in_place }));
    return made;
  };
  const nothing = () => { warn(null); for (const id of ["overhead", "proof", ...METRICS.map((field) => field.id)]) put(id, null, "–"); };
  const WORDS = { waiting: "Waiting for a free core", solving: "Solving", cancelled: "Waiting for a free core", failed: "Failed" };
  const standing = (point) => {
    const known = point.energy_j !== null;
    if (point.state === "failed") return "The solve failed";
    if (point.status === "infeasible") return "No schedule meets these limits";
    if (point.state === "done") return known ? (point.status === "optimal" ? "Proven optimal" : `Not proven within ${units.seconds(point.seconds)}`) : "No schedule was found in time";
    if (point.provisional && known) return `${WORDS[point.state]}: best known so far, ${point.neighbour_bytes ? `from ${units.bytes(point.neighbour_bytes)}` : `with a peak of ${units.bytes(point.peak_ram_bytes)}`}`;
    return known ? `${WORDS[point.state]}: this is the best so far` : WORDS[point.state];
  };
  const show = (point) => {
    const known = point.energy_j !== null;
    root.dataset.point = point.id;
    root.dataset.status = point.status ?? "";
    root.dataset.provisional = point.provisional ? "yes" : "";
    say(point.state === "cancelled" ? "waiting" : point.state, standing(point));
    put("solve", point.seconds, units.seconds(point.seconds), point.state === "done" ? (point.status === "feasible" ? "then out of time" : "") : "so far");
    $("more").hidden = point.state !== "done" || point.status !== "feasible";
    if (known) { figures(point); $("old").hidden = true; } else { nothing(); old(); }
    const settled = point.state === "done" || point.state === "failed";
    if (point.state === "failed") fail(point.reason || "the solve failed");
    else if (point.status === "infeasible") panel("No schedule meets these limits", point.reason || "the limits contradict each other", "Without a deadline", point.deadline_s === null ? null : () => late.choose(null));
    else $("why").hidden = true;
    if (settled) announce(point);
    offer(known && !point.provisional ? point : null);
    picture(known ? point : null);
  };
  let announced = "";
  let announcing = null;
  const announce = (point) => {
    clearTimeout(announcing);
    announcing = setTimeout(() => {
      const key = `${point.id}:${point.revision}:${point.state}`;
      if (key === announced || !isWished(point)) return;
      announced = key;
      $("announce").textContent = `${units.bytes(point.ram_bytes)}: ${standing(point)}${point.energy_j === null ? "" : `, ${$("energy_j").textContent}, overhead ${$("overhead").textContent}`}.`;
    }, 2 * CALM_MS);
  };

  // -- below the minimum, infeasible, failed ---------------------------------------------------
  let leave = null;
  const panel = (head, text, button, then = null) => {
    $("why").hidden = false;
    $("why-head").textContent = head;
    $("why-text").textContent = sentence(text);
    $("why-held").replaceChildren();
    $("why-go").hidden = !then;
    $("why-go").textContent = button;
    leave = then;
  };
  const fail = (text) => { say("failed", "The solve failed"); panel("That did not work", text, "Try again", () => send()); };
  // The parts of the minimum RAM: tensors, which can be highlighted, and unnamed bytes.
  const partsOf = (why) => {
    const item = (name, bytes, role) => {
      const made = document.createElement("li");
      const size = document.createElement("b");
      size.textContent = units.bytes(bytes);
      made.append(size, " ", name, role ? ` (${role})` : "");
      return made;
    };
    const button = ({ tensor, index }) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = tensor;
      made.addEventListener("click", () => page.select(index));
      return made;
    };
    const apart = [["workspace", why.workspace_bytes], ["state", why.state_bytes], ["resident bytes", why.resident_bytes]];
    return [...why.tensors_in_ram.map((one) => item(button(one), one.bytes, one.role)), ...apart.filter((one) => one[1]).map(([name, bytes]) => item(name, bytes, ""))];
  };
  const explain = async (signal) => {
    const limits = new URLSearchParams({ ram_bytes: wished.ram_bytes });
    if (wished.deadline_s !== null) limits.set("deadline_s", wished.deadline_s);
    const why = await (await ask(`/api/problems/${encodeURIComponent(problem.problem)}/why?${limits}`, { signal })).json();
    adopt();
    nothing();
    offer(null);
    picture(null);
    $("more").hidden = true;
    put("solve", null, "–");
    root.dataset.status = root.dataset.point = "";
    const least = why.min_ram_bytes ?? problem.floor_bytes;
    panel("Why not less?", why.text, `Go to ${units.bytes(least)}`, () => ram.choose(least));
    $("why-held").append(...partsOf(why));
    say("below", `No schedule needs less than ${units.bytes(least)}`);
    old();
    $("announce").textContent = $("say").textContent;
  };

  // -- the answer in charts --------------------------------------------------------------------
  const answers = new Map();
  const mounted = new Set();
  let drawn = null;
  let pictured = null;
  let fetching = null;
  let calm = null;
  const keyOf = (point) => `${point.id}:${point.revision}`;
  let fading = null;
  const fade = () => { $("answer").dataset.stale = "yes"; };
  // Shows the budget of the charts if they are not those of the requested budget.
  const old = () => {
    const point = drawn && points.get(drawn.slice(0, drawn.lastIndexOf(":")));
    $("old").hidden = !point;
    if (point) $("old").textContent = `The charts below are of ${units.bytes(point.ram_bytes)}: no schedule that meets these limits is known.`;
  };
  const fresh = (key) => { $("old").hidden = true; clearTimeout(fading); fading = null; $("answer").dataset.stale = ""; root.dataset.answer = key; };
  // Shows the charts of a point. Old charts are faint until the new ones are loaded, and without a point.
  const picture = (point) => {
    pictured = point;
    const key = point && keyOf(point);
    if (drawn === key && answers.has(key)) { tell(answers.get(key)); fresh(key); return; }
    if (!point || !drawn || !drawn.startsWith(`${point.id}:`)) { fade(); delete root.dataset.answer; }
    else fading ??= setTimeout(fade, CALM_MS);  // the metrics are those of a newer schedule than the charts
    if (point && answers.has(key)) drawAnswer(point, answers.get(key));
    else if (point && (!fetching || fetching.id !== point.id)) fetchAnswer(point);
  };
  const isPictured = (point) => pictured !== null && pictured.id === point.id;
  const fetchAnswer = async (point) => {
    fetching?.stop.abort();
    const mine = { id: point.id, stop: new AbortController() };
    let got = point;
    fetching = mine;
    try {
      const reply = await ask(`/api/points/${encodeURIComponent(point.id)}/answer?revision=${point.revision}`, { signal: mine.stop.signal });
      if (reply.status === 204) { setTimeout(() => { if (isPictured(point)) picture(pictured); }, RETRY_MS); return; }
      const answer = await reply.json();
      got = { ...point, revision: Number(new URL(reply.url).searchParams.get("revision")) };  // may be newer than requested
      answers.set(keyOf(got), answer);
      if (answers.size > KEPT) answers.delete(answers.keys().next().value);
      if (isPictured(point)) await drawAnswer(got, answer);
    } catch (error) {
      showError(error, "take-error");
      return;
    } finally {
      if (fetching === mine) fetching = null;
    }
    if (isPictured(point) && pictured.revision > got.revision) picture(pictured);
  };
  const drawChart = (type, data) => {
    const part = $(type);
    part.hidden = !data;
    if (!data) return undefined;
    const id = `${type}-A`;
    if (mounted.has(id)) return page.replace(id, data);
    mounted.add(id);
    return page.mount(id, type, data);
  };
  // Hide the charts of another graph before the new graph is set.
  const adopt = () => {
    if (page.graph === problem.graph) return false;
    page.know(problem.graph);
    drawn = null;
    for (const type of CHARTS) $(type).hidden = true;
    return true;
  };
  const tell = (answer) => {
    $("take-error").textContent = "";
    $("command").textContent = answer.command.join("\n");
    $("copy").disabled = false;
    warn(answer.answers[0]);
  };
  // The first chart changes at once, the others when the slider has stopped.
  const drawAnswer = async (point, answer) => {
    await page.ready;
    const key = keyOf(point);
    const rush = adopt();
    drawn = key;
    const [first, ...others] = CHARTS;
    await drawChart(first, answer.charts[first]);
    if (drawn !== key) return;
    tell(answer);
    clearTimeout(calm);
    calm = setTimeout(() => { if (drawn === key) for (const type of others) drawChart(type, answer.charts[type]); }, rush ? 0 : CALM_MS);
    if (isPictured(point)) fresh(key);
  };
  let pointing = null;
  const drawPoints = () => {
    const scale = ram.scale;
    const here = Array.from(points.values()).find(isWished);
    drawChart("points", { points: Array.from(points.values()), scale, budget_bytes: wished.ram_bytes, here: here && here.id, go });
  };
  const drawPointsSoon = () => { pointing ??= setTimeout(() => { pointing = null; drawPoints(); }, CALM_MS); };

  // -- exports ----------------------------------------------------------------------------------
  let offered = null;
  const offer = (point) => {
    offered = point;
    document.querySelectorAll("[data-export]").forEach((button) => {
      button.disabled = !point;
    });
    if (!point) { $("copy").disabled = true; $("command").textContent = ""; }
  };
  const take = async (button) => {
    const what = button.dataset.export;
    $("take-error").textContent = "";
    try {
      const reply = await ask(`/api/points/${encodeURIComponent(offered.id)}/export/${what}`);
      const name = /filename="?([^";]+)"?/.exec(reply.headers.get("Content-Disposition") || "");
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await reply.blob());
      link.download = name ? name[1] : what;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    } catch (error) {
      showError(error, "take-error");
    }
  };
  const copy = async () => {
    await navigator.clipboard.writeText($("command").textContent);
    $("copy").textContent = "Copied";
    setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
  };

  // -- start -----------------------------------------------------------------------------------
  const power = (n) => 2 ** Math.max(0, Math.floor(Math.log2(n)));
  const ram = makeLimit("ram", {
    format: units.bytes, grain: power, wrong: "A size such as 256KiB, 1.5MB or 50%.",
    read: (text) => units.readBytes(text, problem.keep_all_bytes) || undefined,
    describe: (value) => `${units.bytes(value)}, ${units.share(value / problem.keep_all_bytes)} of the keep-all peak`,
    changed: (value) => choose({ ram_bytes: value }),
  });
  const late = makeLimit("deadline", {
    format: (value) => (value === null ? "none" : units.seconds(value)), grain: (n) => 10 ** Math.floor(Math.log10(n)), wrong: "A time such as 20ms, 1.5s or 110%, or none.",
    read: (text) => (/^\s*(none)?\s*$/i.test(text) ? null : units.readSeconds(text, problem.deadline.single_pass_s) || undefined),
    describe: (value) => (value === null ? "no deadline" : units.seconds(value)),
    changed: (value) => choose({ deadline_s: value }),
  });
  $("problem").addEventListener("change", readChoice);
  $("why-go").addEventListener("click", () => leave());
  $("more").addEventListener("click", () => { $("more").hidden = true; $("ram").focus(); send({ more: true }); });
  $("copy").addEventListener("click", copy);
  document.querySelectorAll("[data-export]").forEach((button) => button.addEventListener("click", () => take(button)));
  if (page.narrow()) $("problem").open = false;
  const begin = async () => {
    let offers;
    try { offers = await (await ask("/api/choices")).json(); } catch (error) { showError(error, "problem-error"); return; }
    choices.fill(offers);
    readAddress(offers.initial);
    choices.show(choice);
    listen();
    enter();
  };
  begin();
})();
