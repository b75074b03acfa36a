// A limit: a slider with marks, and a field for exact values. `limit.set(scale)` sets its range,
// `limit.value` is its value (null for none), and `changed(value)` is called when the user changes it.
const makeLimit = (id, { format, read, wrong, grain, describe, changed }) => {
  const range = page.$(id);
  const text = page.$(`${id}-text`);
  const error = page.$(`${id}-error`);
  const ticks = page.$(`${id}-ticks`);
  const steps = Number(range.max);
  const BELOW = 0.06;
  const APART = 10;
  let scale = null;
  let stops = [];
  let value = null;
  let typing = false;  // the typed text is not overwritten when the range changes

  const share = (wanted) => {
    const { low, high, log } = scale;
    const found = log ? Math.log(wanted / low) / Math.log(high / low) : (wanted - low) / (high - low);
    return Math.min(1, Math.max(0, found));
  };
  const at = (part) => (scale.log ? scale.low * (scale.high / scale.low) ** part : scale.low + part * (scale.high - scale.low));
  const place = (wanted) => (wanted === null ? steps : Math.round(share(wanted) * (scale.none ? steps - 1 : steps)));

  // Slider positions have round values, except for one position per mark.
  const makeStops = () => {
    const last = scale.none ? steps - 1 : steps;
    stops = Array.from({ length: last + 1 }, (_, i) => {
      const step = grain(Math.abs(at((i + 1) / last) - at(i / last)));
      return Number(Math.max(Math.round(at(i / last) / step) * step, step).toPrecision(12));
    });
    for (const mark of scale.marks) if (mark.value >= scale.low && mark.value <= scale.high) stops[place(mark.value)] = mark.value;
    if (scale.none) stops.push(null);
  };

  const show = () => {
    range.value = place(value);
    if (!typing) text.value = format(value);
    const part = Number(range.value) / steps;
    range.style.setProperty("--at", part);
    range.setAttribute("aria-valuetext", describe(value));
  };
  const choose = (wanted) => {
    typing = false;
    error.textContent = "";
    text.removeAttribute("aria-invalid");
    if (wanted === value) { show(); return; }
    value = wanted;
    show();
    changed(value);
  };

  const outside = ({ value: of }) => (of === null ? "" : of > scale.high ? " ▸" : of < scale.low ? " ◂" : "");
  const drawTicks = () => {
    ticks.replaceChildren(...[...scale.marks].sort((a, b) => Boolean(outside(a)) - Boolean(outside(b)) || (a.value ?? Infinity) - (b.value ?? Infinity)).map((mark) => {
      const tick = document.createElement("button");
      tick.type = "button";
      tick.className = outside(mark) ? "tick outside" : "tick";
      tick.style.setProperty("--at", mark.value === null ? 1 : (share(mark.value) * (scale.none ? steps - 1 : steps)) / steps);
      tick.innerHTML = `<span>${mark.name}${outside(mark)}</span> <b>${mark.value === null ? "" : format(mark.value)}</b>`;
      if (outside(mark)) tick.disabled = true;
      tick.addEventListener("click", () => choose(mark.value));
      return tick;
    }));
    arrange();
  };
  // Labels stay inside the rail; labels that would overlap are moved to the next row.
  const arrange = () => {
    const wide = ticks.clientWidth;
    const rows = [];
    for (const tick of ticks.children) {
      const middle = wide * Number(tick.style.getPropertyValue("--at"));
      const width = tick.offsetWidth;
      const left = Math.min(Math.max(0, middle - width / 2), Math.max(0, wide - width));
      let row = 0;
      while ((rows[row] || []).some(([from, to]) => left < to + APART && from < left + width + APART)) row += 1;
      (rows[row] ??= []).push([left, left + width]);
      tick.style.left = `${left}px`;
      tick.style.setProperty("--row", row);
      tick.style.setProperty("--stem", `${middle - left}px`);
    }
    ticks.style.setProperty("--rows", Math.max(1, rows.length));
  };
  new ResizeObserver(() => { if (scale) arrange(); }).observe(ticks);

  range.addEventListener("input", () => choose(stops[Number(range.value)]));
  text.addEventListener("input", () => { typing = true; });
  text.addEventListener("blur", () => { typing = false; });
  text.addEventListener("change", () => {
    const found = read(text.value);
    if (found !== undefined) { choose(found); return; }
    text.setAttribute("aria-invalid", "true");
    error.textContent = wrong;
  });
  text.addEventListener("keydown", (event) => { if (event.key === "Escape") choose(value); });

  return {
    get value() { return value; },
    get scale() { return scale; },
    // Unlike `choose`, `move` sets the slider without a call of `changed`.
    move: (wanted) => { value = wanted; show(); },
    set: ({ marks, low, high, log, none = false }, wanted) => {
      const lowest = log ? low * (low / high) ** (BELOW / (1 - BELOW)) : low - ((high - low) * BELOW) / (1 - BELOW);
      scale = { marks, low: Math.max(lowest, low / 2), high, log, none };
      range.style.setProperty("--floor", share(low) * (none ? (steps - 1) / steps : 1));
      range.disabled = text.disabled = false;
      makeStops();
      drawTicks();
      value = wanted;
      show();
    },
    choose,
  };
};
