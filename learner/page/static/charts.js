// The curves: uPlot where a curve is a line, canvases of our own for the histogram of lag and the line of events.
import { $, address, css, el, number, place, seconds, share } from "./dom.js";
import { drawMarks, Marks, tellMarks } from "./marks.js";

const EVENT_COLORS = {
  publish: "--pale",
  join: "--green",
  leave: "--red",
  suspicion: "--red",
  guard: "--orange",
  evaluation: "--blue",
  checkpoint: "--violet",
  resume: "--red",
  verdict: "--orange",
};
const LAG_COLORS = ["--lag0", "--lag1", "--lag2", "--lag3", "--lag4"]; // told apart by their lightness, too
const LEFT = 52;
const USUAL_SMOOTHING = "0.05";
// The order of the groups behind a figure's point; of other figures the worst reward comes first.
const BEHIND = { kl: "ratio", ratio: "ratio", length: "length", lag: "lag", loss: "-advantage", gradient: "ratio" };
const COLORS_BEHIND = { kl: "gap", ratio: "ratio", entropy: "entropy", loss: "advantage", gradient: "ratio" };
// Of runs beside; the run itself is blue then. Of several curves in a figure each has a dash of its own.
const OTHER_COLORS = ["violet", "green", "red", "orange"];
// Of a curve by name, as in learner/reports/history.py.
const MAX_PARTS = 12;
const PART_COLORS = ["blue", "orange", "green", "violet", "red", "grey"];
const PALE = { blue: "pale" }; // of what is not smoothed; other colours have none
const LAG_HEIGHT = 100; // of the histogram's columns
const NO_POINTS = { show: false };
const DASHES = [[7, 4], [2, 3], [12, 3, 2, 3], [4, 8]];

/** @param {Column} values @param {number} window @returns {Column} */
function smoothed(values, window) { // centred mean of what is known, shorter at the ends
  if (window <= 1) return values;
  const sums = new Float64Array(values.length + 1), known = new Uint32Array(values.length + 1);
  values.forEach((v, i) => {
    sums[i + 1] = sums[i] + (v ?? 0);
    known[i + 1] = known[i] + (v == null ? 0 : 1);
  });
  const half = window >> 1;
  return values.map((v, i) => {
    const from = Math.max(0, i - half), to = Math.min(values.length, i + half + 1), count = known[to] - known[from];
    return v == null || !count ? null : (sums[to] - sums[from]) / count;
  });
}

// The curves of a figure with a run's values. One by name is a curve for each of its names, if there are two at least.
/** @param {FigureSpec} figure @param {Columns} columns @returns {MeasuredCurve[]} */
export function measuredCurves(figure, columns) {
  return figure.curves.flatMap((curve) => {
    const values = columns[curve.name] ?? [];
    if (!curve.by_name) return [{ ...curve, values }];
    const names = [...new Set(values.flatMap((each) => Object.keys(each ?? {})))].sort().slice(0, MAX_PARTS);
    return (curve.alone || names.length > 1 ? names : []).map((name, i) => ({
      ...curve,
      title: name,
      color: PART_COLORS[i % PART_COLORS.length],
      values: values.map((each) => each?.[name] ?? null),
    }));
  });
}

// What stands on the x axis: `of` says it for each step, from the column `by`; `first` for version 0, before them all.
const AXES = {
  steps: { title: "step", by: "step", of: (c) => c.step, first: () => 0, show: number },
  tokens: { title: "sampled tokens", by: "sampled_tokens", of: tokensSoFar, first: () => 0, show: number },
  time: {
    title: "time since the start",
    by: "time_s",
    of: (c) => lives(c.time_s),
    first: () => 0,
    show: seconds,
    ticks: (at) => at.map(duration),
  },
  clock: {
    title: "clock",
    by: "unix_s",
    of: (c) => rising(c.unix_s),
    first: (c, xs) => xs[0] - (c.time_s?.[0] ?? 0),
    show: when,
    ticks: (at) => at.map((v) => (at.at(-1) - at[0] > DAY ? day : timeOfDay).format(new Date(1000 * v))),
  },
};
const [MINUTE, HOUR, DAY] = [60, 3600, 86400];
const TIME_STEPS = [
  ...[1, 2, 5, 10, 15, 30].flatMap((n) => [n, n * MINUTE]),
  ...[1, 2, 3, 6, 12].map((n) => n * HOUR),
  ...[1, 2, 7, 30].map((n) => n * DAY),
].sort((a, b) => a - b);

/** @param {Columns} c */
function tokensSoFar(c) { // of steps that were made one there is the mean
  let sum = 0;
  return c.step.map((step, i) => (sum += (c.sampled_tokens?.[i] ?? 0) * (step - (c.step[i - 1] ?? step - 1))));
}

/** @param {Column} column */
function rising(column) { // an axis has no gaps, and never goes back: what is not known is as what was before it
  let last = column.find((v) => v != null);
  return column.map((v) => (last = Math.max(last, v ?? last)));
}

/** @param {Column} column */
function lives(column) { // earlier releases counted the time of each start from 0
  let last = 0, before = 0;
  return column.map((v) => {
    if (v == null) return last;
    if (before + v < last) before = last;
    return (last = before + v);
  });
}

export class Charts {
  /** @param {ShownRun & { others: ShownRun[] }} run @param {FigureSpec[]} figures @param {MarkKind[]} kinds */
  constructor(run, figures, kinds) { // what is drawn is the learner's to say: learner/reports/history.py, marks.py
    this.run = run;
    this.marks = new Marks(kinds, () => this.set());
    /** @type {[number, number] | null} */
    this.range = null;
    /** @type {Map<string, { plot: uPlot, labels: string }>} */
    this.plots = new Map();
    /** @type {Map<string, Interval[]>} */
    this.intervals = new Map();
    /** @type {WeakMap<Columns, { axis: object, xs: number[] }>} */
    this.placed = new WeakMap();
    /** @type {Map<string, HTMLElement>} */
    this.boxes = new Map();
    const box = $("charts");
    this.have(figures);
    if ($("events")) this.addEvents(box); // runs of others' loops have neither lag nor events
    for (const name of ["smooth", "axis"]) $(name).addEventListener("change", () => this.set());
    $("find").addEventListener("input", () => {
      this.remember();
      this.update();
    });
    $("more").addEventListener("toggle", () => this.update());
    $("log").addEventListener("click", () => {
      $("log").setAttribute("aria-pressed", String(!this.log));
      this.set();
    });
    const zoom = {
      whole: () => null,
      in: (r) => [r[0] + (r[1] - r[0]) / 4, r[1] - (r[1] - r[0]) / 4],
      out: (r) => [r[0] - (r[1] - r[0]) / 2, r[1] + (r[1] - r[0]) / 2],
      back: (r) => r.map((x) => x - (r[1] - r[0]) / 3),
      on: (r) => r.map((x) => x + (r[1] - r[0]) / 3),
    };
    for (const [name, move] of Object.entries(zoom)) {
      $(`zoom-${name}`).addEventListener("click", () => this.zoom(move(this.shown())));
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    let width = 0;
    new ResizeObserver(() => {
      if (box.clientWidth && box.clientWidth !== width) {
        width = box.clientWidth;
        this.draw();
      }
    }).observe(box);
  }

  addEvents(box) {
    this.lag = box.appendChild(canvasFigure("lags", "Lag of the trajectories of each step, in versions", "whole"));
    const bars = this.lag.querySelector("canvas");
    tellMarks(bars, this.lag, LEFT, () => this.lagMarks(bars.clientWidth - LEFT - 8));
    this.line = $("events").appendChild(canvasFigure("events-line", "Events over steps", "whole"));
    this.list = $("events").appendChild(
      el("div", { class: "events", tabindex: "0", role: "region", "aria-label": "List of events" }, el("table")),
    );
  }

  // Boxes for these figures, in their order; those of others go.
  /** @param {FigureSpec[]} figures */
  have(figures) {
    this.figures = figures;
    for (const [id, box] of this.boxes) {
      if (figures.some((each) => each.id === id)) continue;
      this.plots.get(id)?.plot.destroy();
      this.plots.delete(id);
      this.boxes.delete(id);
      box.remove();
    }
    for (const { id, heading, whole, drawn } of figures) {
      this.boxes.set(id, this.boxes.get(id) ?? figure(id, heading, whole));
      (drawn ? $("charts") : $("more-charts")).append(this.boxes.get(id));
    }
  }

  get log() {
    return $("log").getAttribute("aria-pressed") === "true";
  }

  get axis() { // steps, where the run has not what is wanted
    const wanted = AXES[$("axis").value];
    return wanted && this.run.columns[wanted.by]?.some((v) => v != null) ? wanted : AXES.steps;
  }

  // The place of each step of a run on the axis.
  /** @param {Columns} c @returns {number[]} */
  places(c) {
    const axis = c[this.axis.by]?.some((v) => v != null) ? this.axis : AXES.steps, known = this.placed.get(c);
    if (known?.axis === axis && known.xs.length === c.step.length) return known.xs;
    const xs = axis.of(c);
    this.placed.set(c, { axis, xs });
    return xs;
  }

  set() {
    this.remember();
    this.draw();
  }

  // What is looked at is in the address, so that it can be sent; what is as usual is not.
  /** @param {Record<string, string>} given */
  look(given) {
    const numbers = [given.from, given.to].map(Number);
    this.range = given.from && given.to && numbers[0] < numbers[1] ? [numbers[0], numbers[1]] : null;
    $("find").value = given.find ?? "";
    $("axis").value = given.x in AXES ? given.x : "steps";
    const smoothings = [...$("smooth").options].map((each) => each.value);
    $("smooth").value = smoothings.includes(given.smooth) ? given.smooth : USUAL_SMOOTHING;
    $("log").setAttribute("aria-pressed", String(given.log === "1"));
    this.marks.hide(given.unmarked ?? "");
  }

  remember() { // without a new entry in the history, and without an event
    const [from, to] = this.range?.map((step) => String(Math.round(10 * step) / 10)) ?? [null, null];
    const smooth = $("smooth").value, x = $("axis").value;
    history.replaceState(
      null,
      "",
      address("run", {
        ...place().given,
        from,
        to,
        find: $("find").value,
        x: x === "steps" ? null : x,
        smooth: smooth === USUAL_SMOOTHING ? null : smooth,
        log: this.log ? "1" : null,
        unmarked: this.marks.hidden,
      }),
    );
  }

  /** @returns {[number, number]} */
  ends() {
    const all = [this.run, ...this.run.others].map((each) => each.columns.step).filter((steps) => steps.length);
    return [Math.min(0, ...all.map((steps) => steps[0])), Math.max(1, ...all.map((steps) => steps.at(-1)))];
  }

  shown() {
    return this.range ?? this.ends();
  }

  // The place of a step on the axis; between two steps as far from them.
  /** @param {Columns} c @param {number} step */
  at(c, step) {
    if (this.axis === AXES.steps) return step;
    const xs = this.places(c), i = lastUpTo(c.step, step);
    if (i < 0) return between(step, 0, c.step[0], this.axis.first(c, xs), xs[0] ?? 0);
    return i + 1 < xs.length ? between(step, c.step[i], c.step[i + 1], xs[i], xs[i + 1]) : xs[i];
  }

  // The step at a place on the axis, in the run itself.
  /** @param {number} x */
  stepAt(x) {
    if (this.axis === AXES.steps) return x;
    const c = this.run.columns, xs = this.places(c), i = lastUpTo(xs, x);
    if (i < 0) return between(x, this.axis.first(c, xs), xs[0], 0, c.step[0]);
    return i + 1 < xs.length ? between(x, xs[i], xs[i + 1], c.step[i], c.step[i + 1]) : c.step[i];
  }

  // The place of each mark of the run: by the clock on an axis of time, unless it belongs to its version.
  /** @returns {(mark: CurveMark) => number} */
  placeOfMark() {
    const c = this.run.columns, xs = this.places(c), byClock = [AXES.time, AXES.clock].includes(this.axis);
    const times = byClock && c.unix_s.some((v) => v != null) ? rising(c.unix_s) : [];
    const first = times[0] - (c.time_s?.[0] ?? 0);
    return ({ kind, step, unix_s }) => {
      if (!times.length || unix_s == null || this.marks.isRegular(kind)) return this.at(c, step);
      const i = lastUpTo(times, unix_s);
      if (i < 0) return between(Math.max(unix_s, first), first, times[0], this.axis.first(c, xs), xs[0]);
      return i + 1 < xs.length ? between(unix_s, times[i], times[i + 1], xs[i], xs[i + 1]) : xs[i];
    };
  }

  /** @returns {[number, number]} */
  shownPlaces() {
    const c = this.run.columns;
    if (this.axis === AXES.steps) return this.shown();
    if (this.range) return [this.at(c, this.range[0]), this.at(c, this.range[1])];
    const runs = [this.run, ...this.run.others].map((each) => each.columns).filter((each) => each.step.length);
    const low = Math.min(...runs.map((each) => this.at(each, 0))),
      high = Math.max(...runs.map((each) => this.places(each).at(-1)));
    return [low, high > low ? high : low + 1];
  }

  /** @param {[number, number] | null} range */
  zoom(range) {
    const [first, last] = this.ends();
    if (range) {
      let [from, to] = [Math.max(first, range[0]), Math.min(last, range[1])];
      if (to - from < 2) to = from + 2;
      range = to - from >= last - first ? null : [from, to];
    }
    this.range = range;
    this.remember();
    this.update();
  }

  /** @param {Columns} c */
  window(c) {
    return Math.round(Number($("smooth").value) * c.step.length);
  }

  /** @param {FigureSpec} figure @param {Column} column @returns {Column} */
  logged(figure, column) {
    return this.log && figure.log ? column.map((v) => (v > 0 ? v : null)) : column;
  }

  // What a figure holds of the run and of those beside it: tables of steps and lines. A line has its values and what
  // uPlot is told of it, so that the two are never made by different rules.
  /** @param {FigureSpec} figure @returns {DrawnTable[]} */
  tables(figure) {
    return [...this.own(figure), ...this.run.others.flatMap((other, i) => this.beside(figure, other, i))];
  }

  /** @param {FigureSpec} figure @returns {DrawnTable[]} */
  own(figure) {
    const c = this.run.columns, window = this.window(c), beside = this.run.others.length > 0;
    const few = { show: () => this.run.columns.step.length < 60, size: 4 };
    const lines = figure.stacked
      ? this.stacked(figure, window)
      : measuredCurves(figure, c).flatMap(({ values: measured, title, color, largest }, k) => {
        const values = this.logged(figure, measured),
          of = beside ? { color: "blue", dash: dashOf(k) } : { color };
        if (window <= 1 || largest) return [line(title, of.color, values, { dash: of.dash, points: few })];
        return [
          line(`${title}, raw`, PALE[of.color] ?? "line", values, { width: 1, points: NO_POINTS }),
          line(title, of.color, smoothed(values, window), { width: 2, dash: of.dash, points: NO_POINTS }),
        ];
      });
    const color = beside ? "blue" : "orange";
    return [
      { xs: this.places(c), lines },
      ...(figure.held_out ? [this.heldOut(this.run, "held out", color)] : []),
    ];
  }

  /** @param {FigureSpec} figure @param {number} window @returns {DrawnLine[]} */
  stacked(figure, window) {
    let sums = this.run.columns.step.map(() => 0);
    return figure.curves.map(({ name, title, color }) => {
      const part = smoothed(this.run.columns[name], window);
      sums = sums.map((sum, k) => sum + (part[k] ?? 0));
      return line(title, color, sums, {
        fill: () => css(`--${color}`),
        points: NO_POINTS,
        value: (_, v) => seconds(v),
      });
    }).reverse(); // the highest is drawn first
  }

  /** @param {FigureSpec} figure @param {ShownRun} other @param {number} i @returns {DrawnTable[]} */
  beside(figure, other, i) { // smoothed alone: raw ones of several runs hide each other
    const { name, columns: c } = other,
      window = this.window(c),
      own = OTHER_COLORS[i % OTHER_COLORS.length],
      xs = this.places(c);
    if (figure.stacked) {
      const whole = c.step.map((_, k) => figure.curves.reduce((sum, curve) => sum + (c[curve.name][k] ?? 0), 0));
      const told = { points: NO_POINTS, value: (_, v) => seconds(v) };
      return [{ xs, lines: [line(`${name}: a whole step`, own, smoothed(whole, window), told)] }];
    }
    const lines = measuredCurves(figure, c).map((curve, k) =>
      line(`${name}: ${curve.title}`, own, smoothed(this.logged(figure, curve.values), curve.largest ? 1 : window), {
        dash: dashOf(k),
        points: NO_POINTS,
      })
    );
    return [{ xs, lines }, ...(figure.held_out ? [this.heldOut(other, `${name}: held out`, own)] : [])];
  }

  // The newest evaluation of each version, as a table of its own: version 0 is no step.
  /** @param {ShownRun} run @param {string} label @param {string} color @returns {DrawnTable} */
  heldOut({ columns, events }, label, color) {
    const found = [...new Map(events.filter((e) => e.kind === "evaluation").map((e) => [e.step, e]))]
      .sort((a, b) => a[0] - b[0]).map(([step, { accuracy, accuracy_low, accuracy_high }]) => ({
        x: this.at(columns, step),
        y: accuracy ?? null,
        low: accuracy_low ?? null,
        high: accuracy_high ?? null,
        color,
      }));
    const told = (v, x) => {
      const at = found.find((each) => each.x === x && each.low != null);
      return `${number(v)}${v != null && at ? ` (${number(at.low)} to ${number(at.high)})` : ""}`;
    };
    const points = { show: true, size: 7, fill: () => css("--paper") };
    return {
      xs: found.map((each) => each.x),
      intervals: found.filter((each) => each.low != null && each.high != null),
      lines: [
        line(label, color, found.map((each) => each.y), {
          spanGaps: true,
          points,
          value: (u, v, _, i) => told(v, i == null ? null : u.data[0][i]),
        }),
      ],
    };
  }

  /** @param {FigureSpec} figure */
  measured(figure) {
    return [this.run, ...this.run.others].some(({ columns, events }) =>
      measuredCurves(figure, columns).some(({ values }) => values.some((v) => v != null)) ||
      (figure.held_out && events.some((one) => one.kind === "evaluation"))
    );
  }

  draw() {
    this.plots.forEach(({ plot }) => plot.destroy());
    this.plots.clear();
    this.update();
  }

  update() {
    const some = this.run.columns.step.length > 0, wide = $("charts").clientWidth > 0;
    const there = this.figures.filter((figure) => some ? this.measured(figure) : figure.drawn),
      wanted = there.filter((figure) => this.isFound(figure)),
      more = there.filter((figure) => !figure.drawn);
    $("found").textContent = $("find").value.trim() ? `${wanted.length} of ${there.length} figures` : "";
    $("more").hidden = !more.length;
    $("more").querySelector("summary").textContent = `More numbers (${more.length})`;
    if ($("find").value.trim() && wanted.some((figure) => !figure.drawn)) $("more").open = true;
    this.marks.take(some ? this.run.marks : [], this.placeOfMark(), this.shownPlaces());
    for (const figure of this.figures) this.boxes.get(figure.id).hidden = !wanted.includes(figure);
    for (const figure of wanted) {
      const box = this.boxes.get(figure.id);
      box.querySelector("figcaption").textContent = this.words(figure);
      if (some && wide && box.clientWidth) this.plot(figure, box.querySelector(".plot"));
    }
    if (!this.lag) return;
    this.lag.hidden = !isFound(["lag_counts", this.lag.querySelector("h3").textContent]);
    if (!this.lag.hidden) this.drawLag();
    this.drawEvents();
  }

  /** @param {FigureSpec} figure */
  isFound(figure) {
    const names = measuredCurves(figure, this.run.columns).map(({ title }) => title);
    return isFound([figure.id, figure.heading, ...figure.curves.map(({ name }) => name), ...names]);
  }

  /** @param {FigureSpec} figure @param {HTMLElement} box */
  plot(figure, box) { // anew where there are other lines than those that are drawn
    const tables = this.tables(figure),
      axisOfX = this.axis,
      lines = tables.flatMap((table) => table.lines),
      labels = [axisOfX.title, ...lines.map(({ told }) => told.label)].join("\n");
    const parts = tables.map(({ xs, lines }) => [xs, ...lines.map(({ values }) => values)]),
      data = parts.length > 1 ? uPlot.join(parts) : parts[0];
    this.intervals.set(figure.id, tables.flatMap((table) => table.intervals ?? []));
    const drawn = this.plots.get(figure.id);
    if (drawn?.labels === labels) return drawn.plot.setData(data);
    drawn?.plot.destroy();
    const axis = (more) => ({
      stroke: () => css("--soft"),
      grid: { stroke: () => css("--line"), width: 1 },
      ticks: { stroke: () => css("--line") },
      font: "12px system-ui, sans-serif",
      ...more,
    });
    const plot = new uPlot(
      {
        width: box.clientWidth,
        height: figure.whole ? 240 : 170,
        legend: { live: true },
        cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false } },
        hooks: {
          ready: [(u) => {
            u.over.addEventListener("click", () => this.lead(figure, u));
            tellMarks(u.over, u.over, 0, () => this.marks.groups(widthOf(u)));
          }],
          setSelect: [(u) => {
            if (u.select.width > 3) {
              const ends = [u.select.left, u.select.left + u.select.width].map((at) =>
                this.stepAt(u.posToVal(at, "x"))
              );
              this.zoom([ends[0], ends[1]]);
              u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            }
          }],
          draw: [(u) => {
            drawMarks(u.ctx, this.marks.groups(widthOf(u)), u.bbox, devicePixelRatio || 1);
            drawIntervals(u, this.intervals.get(figure.id));
          }],
        },
        scales: {
          x: { time: false, range: () => this.shownPlaces() },
          y: this.log && figure.log ? { distr: 3 } : {
            range: (_, low, high) => {
              const [from, to] = this.shownPlaces(),
                seen = this.intervals.get(figure.id).filter(({ x }) => x >= from && x <= to),
                ends = seen.flatMap(({ low, high }) => [low, high]);
              return low == null ? scale(low, high) : scale(
                Math.min(low, ...ends, ...(figure.zero ? [0] : [])),
                Math.max(high, ...ends),
              );
            },
          },
        },
        axes: [
          axis(axisOfX.ticks ? { values: (_, at) => axisOfX.ticks(at), space: 100, incrs: TIME_STEPS } : {}),
          axis({ size: LEFT, values: (_, ticks) => ticks.map(tick) }),
        ],
        series: [
          {
            label: axisOfX.title,
            value: (_, v) =>
              axisOfX === AXES.steps || v == null
                ? number(v)
                : `${axisOfX.show(v)}, step ${number(Math.round(this.stepAt(v)))}`,
          },
          ...lines.map(({ told }) => told),
        ],
      },
      data,
      box,
    );
    const canvas = plot.root.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${figure.heading}, over ${axisOfX.title}; the line below says it in words`);
    this.plots.set(figure.id, { plot, labels });
  }

  // From a point of a curve to the groups behind it, ordered by their part in that number.
  /** @param {FigureSpec} figure @param {uPlot} u */
  lead(figure, u) {
    if (u.cursor.left < 0) return;
    const given = place().given, at = Math.round(this.stepAt(u.posToVal(u.cursor.left, "x")));
    const steps = this.run.columns.step, i = Math.max(0, lastUpTo(steps, at));
    const end = (steps[i + 1] ?? steps[i] + 1) - 1;
    location.hash = address("trajectories", {
      run: given.run,
      with: given.with,
      order: BEHIND[figure.id] ?? "-reward",
      why: "trained",
      ...(end > steps[i] ? { min_step: steps[i], max_step: end } : { step: steps[i] }),
      color: COLORS_BEHIND[figure.id],
    });
  }

  /** @param {FigureSpec} figure */
  words(figure) {
    const c = this.run.columns, format = figure.stacked ? seconds : number;
    if (!c.step.length) return "No step yet.";
    const own = measuredCurves(figure, c).map(({ title, values }) =>
      `${title}: ${format(atFirst(values))} at first, ${format(atLast(values))} at last`
    ).join("; ");
    const beside = this.run.others.map(({ name: run, columns }) =>
      `${run}: ${
        measuredCurves(figure, columns).map(({ title, values }) => `${title} ${format(atLast(values))} at last`)
          .join(", ")
      }`
    );
    return [own, ...beside].join(". ");
  }

  /** @param {number} width */
  lagMarks(width) { // it is over steps, whatever the axis of the curves
    return this.marks.groups(width, ({ step }) => step, this.shown());
  }

  drawLag() {
    const c = this.run.columns, canvas = this.lag.querySelector("canvas"), context = sized(canvas, 120);
    const top = [c.lag_max, c.reused_lag_max].flat().reduce((most, v) => Math.max(most, v ?? 0), 1),
      [from, to] = this.shown(),
      width = canvas.clientWidth - LEFT - 8;
    if (!context || !c.step.length) return;
    const count = c.step.length, x = (step) => LEFT + ((step - from) / (to - from)) * width;
    const columns = Math.max(1, Math.min(Math.floor(width), Math.ceil(to - from)));
    const sums = Array.from({ length: columns }, () => new Map());
    for (let i = 0; i < count; i++) {
      const at = Math.floor(((c.step[i] - from) / (to - from)) * columns - 1e-9);
      if (at < 0 || at >= columns) continue;
      for (const [lag, number_] of Object.entries(c.lags[i])) {
        sums[at].set(Number(lag), (sums[at].get(Number(lag)) ?? 0) + number_);
      }
    }
    sums.forEach((lags, at) => {
      const total = [...lags.values()].reduce((a, b) => a + b, 0);
      let y = LAG_HEIGHT;
      for (const lag of [...lags.keys()].sort((a, b) => a - b)) {
        const height = (lags.get(lag) / total) * 96;
        context.fillStyle = lagColor(lag, top);
        context.fillRect(LEFT + (at * width) / columns, y - height, width / columns + 0.5, height);
        y -= height;
      }
    });
    drawMarks(context, this.lagMarks(width), { left: LEFT, top: 0, height: LAG_HEIGHT }, 1);
    context.fillStyle = css("--soft");
    context.font = "12px system-ui, sans-serif";
    ["100 %", "50 %", "0"].forEach((text, i) => context.fillText(text, 8, 12 + i * 46));
    context.fillText(number(Math.round(from)), x(from), 116);
    context.textAlign = "right";
    context.fillText(number(Math.round(to)), x(to), 116);
    context.textAlign = "left";
    const shares = (lags, name) =>
      el(
        "span",
        {},
        `${name}: `,
        ...lastShares(lags).map(([lag, part]) => {
          const key = el("span", { class: "key" });
          key.style.background = lagColor(lag, top);
          return el("span", {}, key, `lag ${lag}: ${share(part)}   `);
        }),
      );
    const others = this.run.others.map((other) =>
      el("div", {}, shares(other.columns.lags, `${other.name}, which is not drawn`))
    );
    this.lag.querySelector("figcaption").replaceChildren(shares(c.lags, "In the last steps"), ...others);
  }

  drawEvents() {
    const events = this.run.events,
      kinds = Object.keys(EVENT_COLORS).filter((kind) => events.some((e) => e.kind === kind));
    const canvas = this.line.querySelector("canvas"),
      height = 20 * Math.max(1, kinds.length) + 18,
      context = sized(canvas, height);
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
        else {
          context.beginPath();
          context.arc(x, 20 * lane + 10, 4.5, 0, 7);
          context.fill();
        }
      }
    });
    context.fillStyle = css("--soft");
    const timed = events.filter((e) => e.unix_s != null).sort((a, b) => a.step - b.step);
    const end = (step, event) =>
      [number(Math.round(step)), event ? when(event.unix_s) : ""].filter(Boolean).join(" · ");
    context.fillText(end(from, timed.find((e) => e.step >= from)), left, height - 4);
    context.textAlign = "right";
    context.fillText(end(to, timed.findLast((e) => e.step <= to)), left + width, height - 4);
    context.textAlign = "left";
    const counts = kinds.map((kind) => `${events.filter((e) => e.kind === kind).length} × ${kind}`);
    this.line.querySelector("figcaption").textContent = counts.join(", ") || "Nothing has happened yet.";
    const last = events.filter((e) => e.kind !== "publish").slice(-100).sort((a, b) => b.step - a.step);
    const rows = last.map((
      { kind, step, unix_s, ...rest },
    ) => [
      number(step),
      ...(timed.length ? [unix_s == null ? "" : when(unix_s)] : []),
      kind,
      Object.entries(rest).filter(([, v]) => v != null).map(([k, v]) => `${k} ${number(v)}`).join(", "),
    ]);
    const target = this.list.querySelector("table"),
      head = ["step", ...(timed.length ? ["time"] : []), "event", "what"];
    target.replaceChildren(
      el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((text) => el("td", {}, text))))),
    );
    this.list.hidden = !rows.length;
  }
}

/** @param {Record<string, number>[]} lags @returns {[number, number][]} */
function lastShares(lags) { // of the last sixteenth of the steps, by lag
  const all = new Map();
  lags.slice(-Math.max(1, lags.length >> 4)).forEach((each) =>
    Object.entries(each).forEach(([lag, n]) => all.set(Number(lag), (all.get(Number(lag)) ?? 0) + n))
  );
  const sum = [...all.values()].reduce((a, b) => a + b, 0);
  return [...all].sort((a, b) => a[0] - b[0]).map(([lag, n]) => [lag, n / sum]);
}

/** @param {string} label @param {string} color @param {Column} values @returns {DrawnLine} */
function line(label, color, values, more) {
  return {
    values,
    told: {
      label,
      stroke: () => css(`--${color}`),
      width: 1.5,
      value: (_, v) => number(v),
      ...more,
      points: { fill: () => css(`--${color}`), ...more.points },
    },
  };
}

/** @param {string[]} names */
function isFound(names) { // by all words of the search
  const text = names.join(" ").toLowerCase();
  return $("find").value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/** @param {uPlot} u @param {Interval[]} intervals */
function drawIntervals(u, intervals) {
  const { left, width } = u.bbox;
  for (const { x, low, high, color } of intervals) {
    const [at, bottom, top] = [u.valToPos(x, "x", true), u.valToPos(low, "y", true), u.valToPos(high, "y", true)];
    if (at < left - 1 || at > left + width + 1 || ![bottom, top].every(Number.isFinite)) continue;
    u.ctx.strokeStyle = css(`--${color}`);
    u.ctx.lineWidth = devicePixelRatio || 1;
    const end = 4 * u.ctx.lineWidth;
    u.ctx.beginPath();
    for (
      const [fromX, fromY, toX, toY] of [[at, bottom, at, top], [at - end, bottom, at + end, bottom], [
        at - end,
        top,
        at + end,
        top,
      ]]
    ) {
      u.ctx.moveTo(fromX, fromY);
      u.ctx.lineTo(toX, toY);
    }
    u.ctx.stroke();
  }
}

const widthOf = (u) => u.bbox.width / (devicePixelRatio || 1); // of its curves, in pixels of the page

const dashOf = (k) => (k ? DASHES[(k - 1) % DASHES.length] : undefined);

/** @param {number[]} rising @param {number} v */
function lastUpTo(rising, v) { // the last place whose value is not above it, or -1
  let low = 0, end = rising.length;
  while (low < end) {
    const middle = (low + end) >> 1;
    if (rising[middle] <= v) low = middle + 1;
    else end = middle;
  }
  return low - 1;
}

/** @param {number} v @param {number} from @param {number} to @param {number} low @param {number} high */
const between = (v, from, to, low, high) => (to > from ? low + ((v - from) / (to - from)) * (high - low) : low);

/** @param {Column} values */
function mean(values) {
  const known = values.filter((v) => v != null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

const tail = (column) => Math.max(1, column.length >> 4);
const atFirst = (column) => mean(column.slice(0, tail(column))); // of a sixteenth of it
const atLast = (column) => mean(column.slice(-tail(column)));

const timeOfDay = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
const clock = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
function when(unix_s) { // in the time zone of whoever looks
  return clock.format(new Date(1000 * unix_s));
}

function duration(s) { // as 1:40:00
  const [hours, minutes, rest] = [Math.floor(s / 3600), Math.floor(s / 60) % 60, Math.round(s % 60)];
  const two = (v) => String(v).padStart(2, "0");
  return s < 60 ? `${rest} s` : hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const tick = (
  v,
) => (v == null
  ? ""
  : v !== 0 && Math.abs(v) < 0.001
  ? v.toExponential(0)
  : Number(v.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 4 }));

function scale(low, high) {
  if (low == null || high == null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low === 0 ? 0 : low - room, high + room];
}

const lagColor = (lag, top) =>
  css(
    LAG_COLORS[
      Math.min(
        LAG_COLORS.length - 1,
        top < LAG_COLORS.length ? lag : Math.floor((lag / top) * (LAG_COLORS.length - 0.01)),
      )
    ],
  );

function figure(id, title, whole) {
  return el(
    "figure",
    { class: whole ? "whole" : "", "aria-labelledby": `h-${id}` },
    el("h3", { id: `h-${id}` }, title),
    el("div", { class: "plot" }),
    el("figcaption"),
  );
}

function canvasFigure(id, title, whole) {
  return el(
    "figure",
    { class: whole, "aria-labelledby": `h-${id}` },
    el("h3", { id: `h-${id}` }, title),
    el("canvas", { class: "strip", role: "img", "aria-label": `${title}; the line below says it in words` }),
    el("figcaption"),
  );
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
