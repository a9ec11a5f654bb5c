// The curves: uPlot where a curve is a line, canvases of our own for the histogram of lag and the line of events.
import { $, css, el, number, seconds, share } from "./dom.js";

const LINES = [
  { id: "reward", title: "Reward", whole: true, lines: [["mean reward", "reward_mean", "--blue"]], evaluations: true },
  { id: "kl", title: "KL of sampling to learning policy, nats a token", log: true,
    lines: [["with lag", "behavior_kl", "--blue"], ["numerics alone", "mismatch_kl", "--orange"]] },
  { id: "entropy", title: "Entropy, nats a token", lines: [["entropy", "entropy", "--blue"]] },
  { id: "length", title: "Length, sampled tokens", zero: true, log: true, lines: [["mean length", "length_mean", "--blue"]] },
  { id: "cut", title: "Shares", zero: true, lines: [["cut off", "truncated_share", "--orange"], ["groups without spread", "uniform_groups_share", "--grey"], ["effective samples", "effective_sample_share", "--green"]] },
  { id: "grad", title: "Gradient norm", zero: true, log: true, lines: [["before clipping", "grad_norm", "--blue"]] },
  { id: "time", title: "Seconds a step", zero: true, stacked: [["waiting for groups", "wait_s", "--orange"], ["copying weights", "copy_s", "--grey"], ["training", "train_s", "--blue"]] },
];
const EVENT_COLORS = { publish: "--pale", join: "--green", leave: "--red", guard: "--orange", evaluation: "--blue", checkpoint: "--violet", resume: "--red" };
const LAG_COLORS = ["--green", "--blue", "--violet", "--orange", "--red"];
const LEFT = 52;
const OTHER_COLORS = ["--violet", "--green", "--red", "--orange"]; // of runs beside, where the run itself has one curve; else its curves' own
const DASHES = [[7, 4], [2, 3], [12, 3, 2, 3], [4, 8]];

function smoothed(values, window) { // centred mean of what is known, shorter at the ends
  if (window <= 1) return values;
  const sums = new Float64Array(values.length + 1), known = new Uint32Array(values.length + 1);
  values.forEach((v, i) => { sums[i + 1] = sums[i] + (v ?? 0); known[i + 1] = known[i] + (v == null ? 0 : 1); });
  const half = window >> 1;
  return values.map((v, i) => {
    const from = Math.max(0, i - half), to = Math.min(values.length, i + half + 1), count = known[to] - known[from];
    return v == null || !count ? null : (sums[to] - sums[from]) / count;
  });
}

export class Charts {
  constructor(run) {
    this.run = run;
    this.range = null;
    this.plots = new Map();
    this.boxes = new Map();
    const box = $("charts");
    for (const def of LINES) this.boxes.set(def.id, box.appendChild(figure(def.id, def.title, def.whole)));
    this.lag = box.appendChild(canvasFigure("lag", "Lag of the trajectories of each step, in versions", "whole"));
    this.line = $("events").appendChild(canvasFigure("events-line", "Events over steps", "whole"));
    this.list = $("events").appendChild(el("div", { class: "events", tabindex: "0", role: "region", "aria-label": "List of events" }, el("table")));
    $("smooth").addEventListener("change", () => this.draw());
    $("log").addEventListener("click", () => { $("log").setAttribute("aria-pressed", String(!this.log)); this.draw(); });
    const zoom = { whole: () => null, in: r => [r[0] + (r[1] - r[0]) / 4, r[1] - (r[1] - r[0]) / 4], out: r => [r[0] - (r[1] - r[0]) / 2, r[1] + (r[1] - r[0]) / 2],
      back: r => r.map(x => x - (r[1] - r[0]) / 3), on: r => r.map(x => x + (r[1] - r[0]) / 3) };
    for (const [name, move] of Object.entries(zoom)) $(`zoom-${name}`).addEventListener("click", () => this.zoom(move(this.shown())));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    let width = 0;
    new ResizeObserver(() => { if (box.clientWidth && box.clientWidth !== width) { width = box.clientWidth; this.draw(); } }).observe(box);
  }

  get log() { return $("log").getAttribute("aria-pressed") === "true"; }

  ends() {
    const all = [this.run, ...this.run.others].map(each => each.columns.step).filter(steps => steps.length);
    return [Math.min(0, ...all.map(steps => steps[0])), Math.max(1, ...all.map(steps => steps.at(-1)))];
  }

  shown() { return this.range ?? this.ends(); }

  zoom(range) {
    const [first, last] = this.ends();
    if (range) {
      let [from, to] = [Math.max(first, range[0]), Math.min(last, range[1])];
      if (to - from < 2) to = from + 2;
      range = to - from >= last - first ? null : [from, to];
    }
    this.range = range;
    this.update();
  }

  window(c) { return Math.round(Number($("smooth").value) * c.step.length); }

  logged(def, column) { return this.log && def.log ? column.map(v => (v > 0 ? v : null)) : column; }

  data(def) { // the run's own steps, and those of evaluations and of other runs, one after the other
    const tables = [this.own(def), ...(def.evaluations ? [evaluated(this.run.events)] : []), ...this.run.others.flatMap(other => this.other(def, other))];
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }

  other({ stacked, lines, log, evaluations }, { columns: c, events }) { // smoothed alone: raw ones of several runs hide each other
    const found = stacked ? [c.step.map((_, k) => stacked.reduce((sum, [, name]) => sum + (c[name][k] ?? 0), 0))] : lines.map(([, name]) => this.logged({ log }, c[name]));
    return [[c.step, ...found.map(column => smoothed(column, this.window(c)))], ...(evaluations ? [evaluated(events)] : [])];
  }

  otherSeries(def, other, i, made) {
    const dash = DASHES[i % DASHES.length], plain = { dash, points: { show: false } }, own = OTHER_COLORS[i % OTHER_COLORS.length];
    if (def.stacked) return [made(`${other.name}: a whole step`, own, { ...plain, value: (_, v) => seconds(v) })];
    const lines = def.lines.map(([label, , color]) => made(`${other.name}: ${label}`, def.lines.length > 1 ? color : own, plain));
    return def.evaluations ? [...lines, made(`${other.name}: held out`, own, { dash, spanGaps: true, points: { show: true, size: 7, fill: () => css("--paper") } })] : lines;
  }

  own(def) {
    const c = this.run.columns, window = this.window(c), logged = column => this.logged(def, column);
    if (def.stacked) {
      const parts = def.stacked.map(([, name]) => smoothed(c[name], window));
      const sums = parts.map((_, i) => c.step.map((_, k) => parts.slice(i).reduce((sum, part) => sum + (part[k] ?? 0), 0)));
      return [c.step, ...sums];
    }
    const columns = def.lines.flatMap(([, name]) => (window > 1 ? [logged(c[name]), smoothed(logged(c[name]), window)] : [logged(c[name])]));
    return [c.step, ...columns];
  }

  series(def) {
    const made = (label, color, more) => ({ label, stroke: () => css(color), width: 1.5, value: (_, v) => number(v), points: { show: this.run.columns.step.length < 60, size: 4, fill: () => css(color) }, ...more });
    const others = this.run.others.flatMap((other, i) => this.otherSeries(def, other, i, made));
    if (def.stacked) return [...def.stacked.map(([label, , color]) => made(label, color, { fill: () => css(color), points: { show: false }, value: (_, v) => seconds(v) })), ...others];
    const smooth = Number($("smooth").value) * this.run.columns.step.length > 1.5;
    const pale = { "--blue": "--pale" };
    const lines = def.lines.flatMap(([label, , color]) => (smooth
      ? [made(`${label}, raw`, pale[color] ?? "--line", { width: 1, points: { show: false } }), made(label, color, { width: 2, points: { show: false } })] : [made(label, color)]));
    return def.evaluations ? [...lines, made("held out", "--orange", { spanGaps: true, points: { show: true, size: 7, fill: () => css("--paper") } }), ...others] : [...lines, ...others];
  }

  draw() {
    this.plots.forEach(plot => plot.destroy());
    this.plots.clear();
    if (!this.run.columns.step.length || !$("charts").clientWidth) return this.update();
    const axis = more => ({ stroke: () => css("--soft"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line") }, font: "12px system-ui, sans-serif", ...more });
    for (const def of LINES) {
      const box = this.boxes.get(def.id).querySelector(".plot");
      const log = this.log && def.log;
      const plot = new uPlot({
        width: box.clientWidth, height: def.whole ? 240 : 170, legend: { live: true },
        cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false } },
        hooks: { setSelect: [u => { if (u.select.width > 3) { this.zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); } }] },
        scales: { x: { time: false, range: () => this.shown() }, y: log ? { distr: 3 } : { range: (_, low, high) => scale(def.zero || def.stacked ? Math.min(0, low) : low, high) } },
        axes: [axis(), axis({ size: LEFT, values: (_, ticks) => ticks.map(tick) })],
        series: [{ label: "step", value: (_, v) => number(v) }, ...this.series(def)],
      }, this.data(def), box);
      const canvas = plot.root.querySelector("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${def.title}, over steps; the line below says it in words`);
      this.plots.set(def.id, plot);
    }
    this.update(false);
  }

  update(fresh = true) {
    if (fresh && this.run.columns.step.length && !this.plots.size && $("charts").clientWidth) return this.draw();
    for (const def of LINES) {
      const plot = this.plots.get(def.id);
      if (plot && fresh) plot.setData(this.data(def));
      this.boxes.get(def.id).querySelector("figcaption").textContent = this.words(def);
    }
    this.drawLag();
    this.drawEvents();
  }

  words(def) {
    const c = this.run.columns, n = c.step.length, tail = Math.max(1, n >> 4);
    const mean = (name, from, to) => { const part = c[name].slice(from, to).filter(v => v != null); return part.length ? part.reduce((a, b) => a + b, 0) / part.length : null; };
    if (!n) return "No step yet.";
    const format = def.stacked ? seconds : number;
    const own = (def.stacked ?? def.lines).map(([label, name]) => `${label}: ${format(mean(name, 0, tail))} at first, ${format(mean(name, n - tail, n))} at last`).join("; ");
    const beside = this.run.others.map(({ name: run, columns }) => `${run}: ${(def.stacked ?? def.lines).map(([label, name]) => `${label} ${format(atLast(columns[name]))} at last`).join(", ")}`);
    return [own, ...beside].join(". ");
  }

  drawLag() {
    const c = this.run.columns, canvas = this.lag.querySelector("canvas"), context = sized(canvas, 120);
    const top = Math.max(1, ...c.lag_max.map(v => v ?? 0)), [from, to] = this.shown(), width = canvas.clientWidth - LEFT - 8;
    if (!context || !c.step.length) return;
    const count = c.step.length, x = step => LEFT + ((step - from) / (to - from)) * width;
    const columns = Math.max(1, Math.min(Math.floor(width), Math.ceil(to - from)));
    const sums = Array.from({ length: columns }, () => new Map());
    for (let i = 0; i < count; i++) {
      const at = Math.floor(((c.step[i] - from) / (to - from)) * columns - 1e-9);
      if (at < 0 || at >= columns) continue;
      for (const [lag, number_] of Object.entries(c.lags[i])) sums[at].set(Number(lag), (sums[at].get(Number(lag)) ?? 0) + number_);
    }
    sums.forEach((lags, at) => {
      const total = [...lags.values()].reduce((a, b) => a + b, 0);
      let y = 100;
      for (const lag of [...lags.keys()].sort((a, b) => a - b)) {
        const height = (lags.get(lag) / total) * 96;
        context.fillStyle = lagColor(lag, top);
        context.fillRect(LEFT + (at * width) / columns, y - height, width / columns + 0.5, height);
        y -= height;
      }
    });
    context.fillStyle = css("--soft");
    context.font = "12px system-ui, sans-serif";
    ["100 %", "50 %", "0"].forEach((text, i) => context.fillText(text, 8, 12 + i * 46));
    context.fillText(number(Math.round(from)), x(from), 116);
    context.textAlign = "right";
    context.fillText(number(Math.round(to)), x(to), 116);
    context.textAlign = "left";
    const shares = (lags, name) => el("span", {}, `${name}: `, ...lastShares(lags).map(([lag, part]) => {
      const key = el("span", { class: "key" });
      key.style.background = lagColor(lag, top);
      return el("span", {}, key, `lag ${lag}: ${share(part)}   `);
    }));
    const others = this.run.others.map(other => el("div", {}, shares(other.columns.lags, `${other.name}, which is not drawn`)));
    this.lag.querySelector("figcaption").replaceChildren(shares(c.lags, "In the last steps"), ...others);
  }

  drawEvents() {
    const events = this.run.events, kinds = Object.keys(EVENT_COLORS).filter(kind => events.some(e => e.kind === kind));
    const canvas = this.line.querySelector("canvas"), height = 20 * Math.max(1, kinds.length) + 18, context = sized(canvas, height);
    const [from, to] = this.shown(), left = 84, width = canvas.clientWidth - left - 8;
    if (!context) return;
    context.font = "12px system-ui, sans-serif";
    kinds.forEach((kind, lane) => {
      context.fillStyle = css("--soft");
      context.fillText(kind, 8, 20 * lane + 14);
      context.fillStyle = css(EVENT_COLORS[kind]);
      for (const event of events) {
        if (event.kind !== kind || event.step < from || event.step > to) continue;
        const x = left + ((event.step - from) / (to - from || 1)) * width;
        if (kind === "publish") context.fillRect(x - 0.5, 20 * lane + 4, 1, 12);
        else { context.beginPath(); context.arc(x, 20 * lane + 10, 4.5, 0, 7); context.fill(); }
      }
    });
    context.fillStyle = css("--soft");
    const timed = events.filter(e => e.unix_s != null).sort((a, b) => a.step - b.step);
    const end = (step, event) => [number(Math.round(step)), event ? when(event.unix_s) : ""].filter(Boolean).join(" · ");
    context.fillText(end(from, timed.find(e => e.step >= from)), left, height - 4);
    context.textAlign = "right";
    context.fillText(end(to, timed.findLast(e => e.step <= to)), left + width, height - 4);
    context.textAlign = "left";
    const counts = kinds.map(kind => `${events.filter(e => e.kind === kind).length} × ${kind}`);
    this.line.querySelector("figcaption").textContent = counts.join(", ") || "Nothing has happened yet.";
    const last = events.filter(e => e.kind !== "publish").slice(-100).sort((a, b) => b.step - a.step);
    const rows = last.map(({ kind, step, unix_s, ...rest }) => [number(step), ...(timed.length ? [unix_s == null ? "" : when(unix_s)] : []), kind, Object.entries(rest).filter(([, v]) => v != null).map(([k, v]) => `${k} ${number(v)}`).join(", ")]);
    const target = this.list.querySelector("table"), head = ["step", ...(timed.length ? ["time"] : []), "event", "what"];
    target.replaceChildren(el("thead", {}, el("tr", {}, head.map(text => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows.map(row => el("tr", {}, row.map(text => el("td", {}, text))))));
    this.list.hidden = !rows.length;
  }
}

function lastShares(lags) { // of the last sixteenth of the steps, by lag
  const all = new Map();
  lags.slice(-Math.max(1, lags.length >> 4)).forEach(each => Object.entries(each).forEach(([lag, n]) => all.set(Number(lag), (all.get(Number(lag)) ?? 0) + n)));
  const sum = [...all.values()].reduce((a, b) => a + b, 0);
  return [...all].sort((a, b) => a[0] - b[0]).map(([lag, n]) => [lag, n / sum]);
}

function evaluated(events) { // the newest of each version, as a table of its own: version 0 is no step
  const found = [...new Map(events.filter(e => e.kind === "evaluation").map(e => [e.step, e.accuracy]))].sort((a, b) => a[0] - b[0]);
  return [found.map(e => e[0]), found.map(e => e[1])];
}

function atLast(column) { // the mean of its last sixteenth
  const part = column.slice(-Math.max(1, column.length >> 4)).filter(v => v != null);
  return part.length ? part.reduce((a, b) => a + b, 0) / part.length : null;
}

const clock = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
const when = unix_s => clock.format(new Date(1000 * unix_s)); // in the time zone of whoever looks

const tick = v => (v == null ? "" : v !== 0 && Math.abs(v) < 0.001 ? v.toExponential(0) : Number(v.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 4 }));

function scale(low, high) {
  if (low == null || high == null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low === 0 ? 0 : low - room, high + room];
}

const lagColor = (lag, top) => css(LAG_COLORS[Math.min(LAG_COLORS.length - 1, top < LAG_COLORS.length ? lag : Math.floor((lag / top) * (LAG_COLORS.length - 0.01)))]);

function figure(id, title, whole) {
  return el("figure", { class: whole ? "whole" : "", "aria-labelledby": `h-${id}` }, el("h3", { id: `h-${id}` }, title), el("div", { class: "plot" }), el("figcaption"));
}

function canvasFigure(id, title, whole) {
  return el("figure", { class: whole, "aria-labelledby": `h-${id}` }, el("h3", { id: `h-${id}` }, title),
    el("canvas", { class: "strip", role: "img", "aria-label": `${title}; the line below says it in words` }), el("figcaption"));
}

function sized(canvas, height) { // in device pixels, cleared
  const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
  if (!width) return null;
  canvas.style.height = `${height}px`;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}
