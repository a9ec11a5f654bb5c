// The run as it goes: numbers, processes, balance, curves and events, kept up to date by one stream of events.
import { Charts, measuredCurves } from "./charts.js";
import { crowd } from "./crowd.js";
import { $, ask, el, NeedsToken, number, seconds, share, table } from "./dom.js";
import { Machines } from "./machines.js";

const NEW_AFTER_MS = 2000;
const MAX_STEPS = 40000; // twice what the learner sends at once
const OTHERS_EVERY_MS = 15000; // runs beside this one have no stream of events: of those a browser takes six

export class RunView {
  constructor({ needsToken, said }) {
    /** @type {Columns} */
    this.columns = { step: [], lags: [] };
    /** @type {RunEvent[]} */
    this.events = [];
    /** @type {CurveMark[]} */
    this.marks = [];
    this.needsToken = needsToken;
    this.said = said;
    this.run = "0";
    this.name = "";
    /** @type {ShownRun[]} */
    this.others = [];
    /** @type {OtherRun[]} */
    this.wanted = [];
    /** @type {FigureSpec[] | null} */
    this.figures = null;
    /** @type {MarkKind[] | null} */
    this.markKinds = null;
    /** @type {Charts | null} */
    this.charts = null;
    /** @type {EventSource | null} */
    this.source = null;
    /** @type {ProcessesTold | null} */
    this.told = null;
    /** @type {Record<string, string> | null} */
    this.given = null;
    /** @type {number | null} */
    this.total = null;
    this.machines = new Machines(() => this.run);
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.pause();
      else if (this.visible) this.begin();
    });
  }

  show(run, name, others, given) {
    this.visible = true;
    if (run !== this.run || !this.columns.step.length) this.told = null;
    this.run = run;
    this.given = given;
    this.name = name;
    this.wanted = others;
    this.begin();
  }

  hide() {
    this.visible = false;
    this.pause();
  }

  pause() { // a hidden tab holds no connection: a browser has six for a server
    this.source?.close();
    this.source = null;
    clearTimeout(this.timer);
    clearTimeout(this.again);
  }

  /** @returns {Promise<ShownRun[]>} */
  ofOthers() {
    return Promise.all(this.wanted.map(async (other) => ({ ...other, ...(await ask("steps", { run: other.run })) })));
  }

  async renew() {
    const turn = this.turn, others = await this.ofOthers().catch(() => null);
    if (turn !== this.turn) return;
    if (others) {
      this.others = others;
      this.later();
    }
    this.again = setTimeout(() => this.renew(), OTHERS_EVERY_MS);
  }

  async begin() {
    this.pause();
    this.machines.begin();
    const turn = (this.turn = (this.turn ?? 0) + 1);
    try {
      const [message, made, others, figures, markKinds] = await Promise.all([
        ask("steps", { run: this.run }),
        ask("made_with", { run: this.run }),
        this.ofOthers(),
        this.figures ?? ask("figures"),
        this.markKinds ?? ask("marks"),
      ]);
      if (turn !== this.turn) return;
      this.total = made.settings?.steps ?? null;
      this.columns = message.columns;
      this.events = message.events;
      this.marks = message.marks;
      this.others = others;
      this.figures = figures;
      this.markKinds = markKinds;
      this.charts ??= new Charts(this, figures, markKinds);
      if (this.given) this.charts.look(this.given);
      this.given = null; // what the reader has changed since is in the address
      this.charts.draw();
      this.redraw();
      if (!this.visible || document.hidden) return;
      this.listen(message.at);
      if (others.length) this.again = setTimeout(() => this.renew(), OTHERS_EVERY_MS);
    } catch (error) {
      if (error instanceof NeedsToken) return this.needsToken();
      this.said("the learner does not answer: what it said last is shown");
      this.timer = setTimeout(() => this.begin(), NEW_AFTER_MS);
    }
  }

  listen(at) {
    const source = new EventSource(`/page/data/events?run=${this.run}&at=${at}`);
    this.source = source;
    source.onerror = () => {
      this.said("the learner does not answer: what it said last is shown");
      this.told = null;
      if (source.readyState !== EventSource.CLOSED) return;
      this.timer = setTimeout(() => this.begin(), NEW_AFTER_MS); // an answer other than 200 ends it for good
    };
    source.addEventListener("reset", () => this.begin());
    source.addEventListener("status", (event) => {
      this.told = JSON.parse(event.data);
      const standing = this.told.learner?.standing_s ?? null;
      this.said(
        !this.told.live
          ? `${this.life()}: from its files`
          : standing == null
          ? "live"
          : `no step for ${seconds(standing)}`,
      );
      this.verdict();
      this.processes();
      this.tiles();
    });
    source.onmessage = (event) => {
      this.take(JSON.parse(event.data));
      if (this.columns.step.length > MAX_STEPS) this.begin(); // after days: the learner joins neighbours
      else this.later();
    };
  }

  take(message) {
    const c = this.columns, more = message.columns;
    const last = c.step.at(-1) ?? -1, from = more.step.findIndex((step) => step > last);
    if (from >= 0) { for (const [name, column] of Object.entries(c)) column.push(...more[name].slice(from)); }
    this.events.push(...message.events);
    this.marks.push(...message.marks);
  }

  later() { // a burst draws once
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      this.charts.update();
      this.redraw();
    });
  }

  redraw() {
    this.verdict();
    this.tiles();
    this.balance();
    this.processes();
    this.lastSteps();
    this.sideBySide();
    document.title = `${this.columns.step.length ? `step ${this.columns.step.at(-1)} · ` : ""}Headway`;
  }

  recent(c = this.columns) { // sums over the last steps: their number, seconds and work
    const n = c.step.length, from = Math.max(0, n - Math.max(20, n >> 5));
    const sum = (name) => c[name]?.slice(from).reduce((total, v) => total + (v ?? 0), 0) ?? 0;
    const wall = sum("wait_s") + sum("train_s") + sum("copy_s");
    const mean = (name) => { // of the steps that have it: a what-if has no reward, which is not a reward of 0
      const known = (c[name]?.slice(from) ?? []).filter((v) => v != null);
      return known.length ? known.reduce((total, v) => total + v, 0) / known.length : null;
    };
    return { steps: n - from, wall, sum, mean };
  }

  life() { // of a run that is read from its files
    const step = this.columns.step.at(-1) ?? 0, whole = this.total == null || step >= this.total;
    if (this.told.life !== "ended") return this.told.life === "died" ? `died after step ${number(step)}` : "goes on";
    return whole ? "ended" : `stopped after step ${number(step)} of ${number(this.total)}`;
  }

  curves(figure) {
    return this.figures.find((each) => each.id === figure).curves;
  }

  tiles() {
    const c = this.columns, n = c.step.length, last = (name) => (n ? c[name][n - 1] : null);
    const { steps, wall, sum, mean } = this.recent(),
      step = n ? c.step[n - 1] : 0,
      total = this.told?.learner?.total ?? this.total;
    const evaluation = this.events.filter((one) => one.kind === "evaluation").at(-1);
    const over = step >= total || (this.told?.life != null && this.told.life !== "goes on");
    const standing = this.told?.learner?.standing_s ?? null, paced = standing == null ? wall : 0; // no pace then
    const left = total && paced ? ((total - step) * paced) / steps : null;
    const reused = last("reused_lag_bound") == null // else they have a bound of their own
      ? ""
      : `, trained again ${number(last("reused_lag_max"))} of ${number(last("reused_lag_bound"))}`;
    const tiles = [
      ["Step", number(step), total ? `of ${number(total)}` : ""],
      ["Mean reward", number(mean("reward_mean")), "last steps"],
      ["Held out", number(evaluation?.accuracy), evaluation ? `version ${evaluation.step}` : "no evaluation"],
      [
        "Lag",
        number(mean("lag_mean")),
        `at most ${number(last("lag_max"))} of ${number(last("lag_bound"))}${reused}`,
      ],
      ["Sampled tokens", number(paced ? sum("sampled_tokens") / paced : null), "a second"],
      ["Completions", number(paced ? sum("trajectories") / paced : null), "a second"],
      ["A step", seconds(wall ? wall / steps : null), wall ? `${share(sum("wait_s") / wall)} waiting` : ""],
      [
        "Left",
        over ? "–" : seconds(left),
        this.told?.life != null
          ? this.life()
          : over
          ? "ended"
          : standing == null
          ? "at this pace"
          : `no step for ${seconds(standing)}`,
      ],
    ];
    $("tiles").replaceChildren(
      ...tiles.map(([name, value, more]) =>
        el("div", {}, el("dt", {}, name), el("dd", {}, value, " ", el("small", {}, more)))
      ),
    );
  }

  verdict() { // of a run that has ended, the last one
    const told = this.told, last = this.events.filter((one) => one.kind === "verdict").at(-1);
    const verdict = told?.live ? told.verdict : last, target = $("verdict");
    const was = told?.live || told?.life === "goes on" ? "" : told ? "At the end: " : "Last: ";
    const text = verdict ? `${was}${verdict.sentence}${verdict.remedy ? `; ${verdict.remedy}` : ""}` : "";
    target.hidden = !text;
    target.className = verdict?.state ?? "";
    if (target.textContent !== text) target.textContent = text;
  }

  sideBySide() { // a row for each run
    $("runs-table").hidden = !this.others.length;
    const rows = [this, ...this.others].map(({ name, columns: c, events }) => {
      const { steps, wall, sum, mean } = this.recent(c),
        n = c.step.length,
        evaluation = events.filter((one) => one.kind === "evaluation").at(-1);
      const a_s = (what) => number(wall ? sum(what) / wall : null);
      return [
        name,
        number(n ? c.step[n - 1] : 0),
        number(mean("reward_mean")),
        evaluation ? `${number(evaluation.accuracy)} (version ${evaluation.step})` : "–",
        number(mean("lag_mean")),
        number(mean("entropy")),
        number(mean("length_mean")),
        a_s("sampled_tokens"),
        a_s("trajectories"),
        seconds(wall ? wall / steps : null),
        wall ? share(sum("wait_s") / wall) : "–",
        seconds(n ? c.time_s[n - 1] : null),
      ];
    });
    table($("runs-table").querySelector("table"), [
      "run",
      "step",
      "mean reward",
      "held out",
      "lag",
      "entropy",
      "length",
      "tokens a second",
      "completions a second",
      "a step",
      "of it waiting",
      "time so far",
    ], rows);
  }

  balance() {
    const { wall, sum, steps } = this.recent(), told = this.told, bars = [];
    const bar = (title, parts, whole) => {
      const stack = el(
        "div",
        {
          class: "stack",
          role: "img",
          "aria-label": `${title}: ${parts.map(([name, value]) => `${name} ${share(value / whole)}`).join(", ")}`,
        },
        parts.map(([, value, color]) => {
          const part = el("div", { class: color });
          part.style.width = `${(100 * value) / whole}%`;
          return part;
        }),
      );
      bars.push(
        el("h3", {}, title),
        stack,
        el(
          "ul",
          {},
          parts.map(([name, value, color]) =>
            el("li", {}, el("span", { class: `key ${color}` }), `${name} ${share(value / whole)}`)
          ),
        ),
      );
    };
    if (wall > 0) {
      bar(
        `Learner, last ${steps} steps`,
        this.curves("time").map(({ title, name, color }) => [title, sum(name), `f-${color}`]),
        wall,
      );
      const train = sum("train_s"), passes = sum("forward_backward_s"), optimizer = sum("optimizer_s");
      if (train > 0) {
        bar("Training", [["forward and backward", passes, "f-blue"], ["optimizer", optimizer, "f-violet"], [
          "making batches, the rest",
          Math.max(0, train - passes - optimizer),
          "f-grey",
        ]], Math.max(train, passes + optimizer));
      }
    }
    const idle = told?.generators?.filter((one) => one.idle_share != null) ?? [];
    if (idle.length) {
      const mean = idle.reduce((total, one) => total + one.idle_share, 0) / idle.length;
      bar("Generators, since they serve", [["sampling", 1 - mean, "f-green"], ["idle", mean, "f-orange"]], 1);
    }
    $("balance").replaceChildren(...(bars.length ? bars : [el("p", { class: "soft" }, "No step yet.")]));
  }

  processes() {
    const told = this.told, waits = told?.learner?.waits ?? [], c = this.columns;
    const { wall, sum } = this.recent(),
      a_s = (value, unit) => (wall && told?.learner?.standing_s == null ? `${number(value / wall)} ${unit}/s` : "");
    const waitsFor = (kind) => waits.some((wait) => kind.test(wait.whom));
    const card = (place, title, lines) =>
      el(
        "div",
        { class: `card ${place}` },
        el("h3", {}, title),
        el("ul", {}, lines.map(([text, state]) => el("li", { class: state ?? "" }, text))),
      );
    const arrow = (place, text, held) => el("div", { class: `arrow ${place}${held ? " held" : ""}` }, text);
    const heard = (
      one,
    ) => (one.last_heard_s != null && one.last_heard_s > 5 ? `, heard ${seconds(one.last_heard_s)} ago` : "");
    const state = (one) => (/serving|groups|answers|open|\bok\b/.test(one.state) ? "ok" : "slow");
    const peers = (
      found,
      describe,
      none,
    ) => (found?.length
      ? crowd(found, (one) => [`${one.name}: ${describe(one)}${heard(one)}`, state(one)])
      : [[none, told?.live ? "gone" : ""]]);
    const unknown = told?.live === false ? "not known from files" : "not known";
    const learner = told?.learner
      ? [
        [`version ${told.learner.version}`, "ok"],
        ...told.learner.queues.map((each) => [`${number(each.depth)} ${each.name}`]),
        ...told.learner.problems.map((text) => [text, "gone"]),
        ...(told.learner.notes || []).map((text) => [text]),
      ]
      : [[`version ${c.step.at(-1) ?? 0}`], [
        told?.live === false ? this.life() : "does not answer",
        told?.live === false && told.life !== "died" ? "" : "gone",
      ]];
    const unfolded = [...$("processes").querySelectorAll("details")].map((one) => one.open);
    $("processes").replaceChildren(
      card("learner", "Learner", learner),
      arrow("a1", `→ leases\n← groups\n${a_s(sum("groups"), "groups")}`, waitsFor(/batch|group|env/i)),
      card(
        "env",
        "Env services",
        peers(told?.env_services, (one) => one.state, told?.live ? "none is connected" : unknown),
      ),
      arrow("a2", `→ prompts\n← tokens\n${a_s(sum("sampled_tokens"), "tokens")}`, false),
      card(
        "generator",
        "Generators",
        peers(
          told?.generators,
          (one) =>
            `${one.state}${one.version ? ` ${one.version}` : ""}${
              one.tokens_per_s != null ? `, ${number(one.tokens_per_s)} tokens/s` : ""
            }${one.idle_share != null ? `, idle ${share(one.idle_share)}` : ""}`,
          told?.live ? "none serves" : unknown,
        ),
      ),
      arrow("a3", `↓ completions   ↑ rewards\n${a_s(sum("trajectories"), "rewards")}`, false),
      card(
        "reward",
        "Reward services",
        told?.reward_services?.length
          ? told.reward_services.map(
            (one) => [`${one.name}: ${seconds(one.latency_s)} a reward, the last in step ${one.step}`, "ok"],
          )
          : [[unknown]],
      ),
      arrow("a4", "weights: learner → generators", waitsFor(/generator/i)),
      el(
        "div",
        { class: "waits" },
        waits.length
          ? el(
            "div",
            { class: "card" },
            el("h3", {}, "The learner waits"),
            el(
              "ul",
              {},
              waits.map((wait) => el("li", { class: "slow" }, `for ${wait.whom}, since ${seconds(wait.since_s)}`)),
            ),
          )
          : null,
        ...(told?.learner?.failures?.length
          ? [
            el(
              "details",
              {},
              el("summary", {}, `${told.learner.failures.length} warnings lately`),
              el("ul", {}, told.learner.failures.map((one) => el("li", {}, `${seconds(one.age_s)} ago: ${one.text}`))),
            ),
          ]
          : []),
      ),
    );
    [...$("processes").querySelectorAll("details")].forEach((one, i) => one.open = unfolded[i] ?? false); // as they were
  }

  lastSteps() {
    const c = this.columns, n = c.step.length, at = Array.from({ length: Math.min(12, n) }, (_, i) => n - 1 - i);
    const columns = this.figures.flatMap((each) => measuredCurves(each, c))
      .map(({ name, title, by_name, values }) => ({ name: by_name ? `${name}/${title}` : name, values }))
      .filter(({ values }) => at.some((i) => values[i] != null));
    const rows = at.map((i) => [number(c.step[i]), ...columns.map(({ values }) => number(values[i]))]);
    table($("table"), ["step", ...columns.map(({ name }) => name)], rows);
  }
}
