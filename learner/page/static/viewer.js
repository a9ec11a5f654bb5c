// Trajectories: those that fit a filter, and one group token by token; of several runs beside each other, where the
// address names some. All of it is in the address.
import { address, ask, el, NeedsToken, number, seconds } from "./dom.js";
import { lanes } from "./lanes.js";
import { sameTask } from "./same_task.js";
import { clean, COLORINGS, legend, scaleOf, strip, wayOf } from "./tokens.js";

const FILTERS = [
  ["words", "Words", "search", "text"],
  ["prompt", "In the prompt", "search", "text"],
  ["step", "Step", "number"],
  ["min_step", "Steps from", "number"],
  ["max_step", "to", "number"],
  ["environment", "Environment", "select"],
  ["task", "Task", "number"],
  ["why", "Kept", "select"],
  ["min_reward", "Reward from", "number"],
  ["max_reward", "to", "number"],
  ["min_length", "Tokens from", "number"],
  ["max_length", "to", "number"],
  ["min_lag", "Lag from", "number"],
  ["min_ratio", "Ratio from", "number"],
  ["finish", "Ending", "select"],
  ["verifier", "Verifier", "select"],
  ["player", "Player", "select"],
];
const FEW = ["verifier", "player"]; // asked for only where there are several
// Orders of the list; without one the newest come first.
const ORDERS = {
  reward: "highest reward",
  "-reward": "lowest reward",
  ratio: "largest ratio",
  "-ratio": "smallest ratio",
  gap: "largest logprob gap",
  "-gap": "smallest logprob gap",
  length: "longest",
  "-length": "shortest",
  lag: "most stale",
  "-lag": "least stale",
  advantage: "highest advantage",
  "-advantage": "lowest advantage",
};
const PAGE = 50;
const MEMBERS = 200; // most trajectories of a group that are shown in the list

const section = (name, children) => el("section", { "aria-label": `Run ${name}` }, el("h2", {}, name), children);
const asText = (key, run, place) =>
  el(
    "p",
    {},
    el("a", {
      href: `/page/data/text?${new URLSearchParams({ key, run: run ?? "0", ...(place == null ? {} : { place }) })}`,
      download: "",
    }, "the whole text, as a file"),
  );
const side = (sections) => el("div", { class: "runs" }, sections);

// A number that differs inside of a group: the lowest and the highest.
function spread(range) {
  const [low, high] = (range ?? [null, null]).map((value) => number(value));
  return low === high ? low : `${low} to ${high}`;
}

// The rewards of a group, a dot for each: full for the highest of the list, empty for the lowest, the row's own framed.
function dots({ rewards, reward, size }, [low, high]) {
  const more = (size ?? 0) - rewards.length;
  const said = rewards.map((v) => number(v)).join(", ") + (more > 0 ? ` and ${number(more)} more` : "");
  return el(
    "span",
    { class: "dots", role: "img", "aria-label": `rewards ${said}`, title: said },
    [...rewards].sort((a, b) => (b ?? -Infinity) - (a ?? -Infinity)).map((v) => {
      const level = v == null ? "none" : high > low ? Math.round((4 * (v - low)) / (high - low)) : 4;
      return el("span", { class: `dot d${level}${v === reward ? " own" : ""}` });
    }),
  );
}

export class Viewer {
  constructor(target, { needsToken }) {
    this.target = target;
    this.needsToken = needsToken;
    this.given = {};
    this.known = null;
    document.addEventListener("keydown", (event) => this.key(event));
  }

  async show(given, name = "", others = []) {
    const run = given.run ?? "0", turn = (this.turn = (this.turn ?? 0) + 1);
    this.given = given;
    this.name = name;
    this.others = others;
    try {
      if (this.run !== run || !this.known || !(given.same || given.group)) { // what is kept grows while a run goes on
        const known = await ask("overview", { run });
        if (turn !== this.turn) return;
        this.known = known;
        this.run = run;
      }
      const made = given.same
        ? await sameTask(given, (change) => this.to(change))
        : given.group
        ? await this.group(given)
        : await this.list(given);
      if (turn === this.turn) this.put(made);
    } catch (error) {
      if (error instanceof NeedsToken) return this.needsToken();
      if (turn === this.turn) {
        this.target.replaceChildren(
          el("p", { role: "alert" }, String(error.message)),
          el("p", {}, el("a", { href: address("trajectories", { run: given.run }) }, "All trajectories")),
        );
      }
    }
  }

  put(made) { // who goes by keyboard stays where he was, or is at the heading of what came instead
    const before = document.activeElement, inside = this.target.contains(before);
    this.target.replaceChildren(...made);
    if (!inside) return;
    const same = [...this.target.querySelectorAll(before.tagName)].find(
      (each) => (before.id ? each.id === before.id : each.textContent === before.textContent),
    );
    const heading = this.target.querySelector("h2");
    heading?.setAttribute("tabindex", "-1");
    (same ?? heading)?.focus({ preventScroll: same != null });
  }

  to(change) {
    return address("trajectories", { ...this.given, ...change });
  }

  firstPage(change) { // of the list that another address asks for
    return this.to({ skip: null, start: null, direction: null, ...change });
  }

  kind() { // what a row of the list is: a group, or nothing for a trajectory
    return this.given.rows === "groups" ? "groups" : null;
  }

  filter() {
    return Object.fromEntries([["run", this.given.run], ...FILTERS.map(([name]) => [name, this.given[name]])]);
  }

  // The list

  async list(given) {
    const order = ORDERS[given.order] ? given.order : null, skip = order ? Number(given.skip ?? 0) || 0 : 0;
    const way = order ? { order, skip } : { start: given.start, direction: given.direction };
    const asked = { ...this.filter(), limit: PAGE, ...way, rows: this.kind() };
    const began = performance.now(),
      found = await ask("rows", asked),
      took = performance.now() - began,
      rows = found.rows;
    const [first, last] = [rows[0], rows.at(-1)].map((row) => this.kind() ? row?.group : row?.key),
      backwards = given.direction === "newer";
    const newer = given.start && (rows.length || !backwards) && !(backwards && rows.length < PAGE) &&
      el("a", { href: this.to({ start: first ?? given.start, direction: "newer" }), rel: "prev" }, "◀ newer");
    const older = (backwards || rows.length === PAGE) && last &&
      el("a", { href: this.to({ start: last, direction: null }), rel: "next" }, "older ▶");
    const pages = () =>
      order ? this.orderedPages(skip, rows.length) : el(
        "p",
        { class: "bar noprint" },
        newer || null,
        older || null,
        given.start ? el("a", { href: this.to({ start: null, direction: null }) }, "newest") : null,
      );
    const status = el(
      "p",
      { class: "soft", role: "status" },
      [
        rows.length ? `${rows.length} shown, in ${Math.round(took)} ms.` : "None that fits.",
        found.kept
          ? `Of step ${number(Number(given.step))}, ${number(found.kept.groups)} of ${
            number(found.kept.groups + found.kept.left_out)
          } groups are kept.`
          : "",
      ].join(" "),
    );
    const nearest = rows.length || !given.step ? null : await this.nearest(Number(given.step));
    const own = [
      ...found.unreadable.map((text) => el("p", { role: "alert" }, `cannot be read: ${text}`)),
      status,
      nearest,
      pages(),
      rows.length ? this.rows(rows) : null,
      rows.length > 12 ? pages() : null,
    ].filter(Boolean);
    const top = [el("h2", {}, "Trajectories"), this.said(), this.form()];
    if (!this.others.length) return [...top, ...own];
    return [
      ...top,
      side([
        section(this.name, own),
        ...(await Promise.all(
          this.others.map((other) => order ? this.listOf(other, way) : this.listOf(other, {}, rows[0]?.step)),
        )),
      ]),
    ];
  }

  orderedPages(skip, count) {
    const link = (to, text, rel) => el("a", { href: this.to({ skip: to || null }), rel }, text);
    return el(
      "p",
      { class: "bar noprint" },
      skip ? link(Math.max(0, skip - PAGE), "◀ before", "prev") : null,
      count === PAGE ? link(skip + PAGE, "more ▶", "next") : null,
    );
  }

  async nearest(step) { // ways to the steps around one of which nothing that fits is kept
    const filter = { ...this.filter(), step: null, limit: 1 };
    const [before, after] = await Promise.all([
      ask("rows", { ...filter, max_step: step }),
      ask("rows", { ...filter, min_step: step, order: null, start: "0-0", direction: "newer" }),
    ]);
    const links = [before, after].flatMap(({ rows }) => rows).map((row) =>
      el(
        "a",
        { href: this.firstPage({ step: row.step }) },
        `step ${number(row.step)}`,
      )
    );
    return links.length ? el("p", {}, "The nearest that are kept: ", links[0], links[1] ? ", " : null, links[1]) : null;
  }

  async listOf(other, way, newest) { // what fits in a run beside this one, up to the step of this one's newest row
    const max_step = newest ?? this.given.max_step;
    const { rows } = await ask("rows", {
      ...this.filter(),
      ...way,
      run: other.run,
      max_step,
      limit: PAGE,
      rows: this.kind(),
    });
    const until = newest == null ? "" : ` up to step ${number(newest)}`;
    return section(
      other.name,
      [
        el("p", { class: "soft" }, rows.length ? `${rows.length} shown${until}` : `None that fits${until}.`),
        rows.length ? this.rows(rows, other.run) : null,
      ].filter(Boolean),
    );
  }

  said() {
    const k = this.known,
      out = k.left_out ? `; ${number(k.left_out)} groups were left out to keep within the share of time` : "";
    return el(
      "p",
      { class: "soft" },
      k.first_step == null
        ? "No trajectory is kept of this run."
        : `Steps ${number(k.first_step)} to ${number(k.last_step)}: ${number(k.trajectories)} trajectories of ${
          number(k.groups)
        } groups${out}.`,
    );
  }

  form() {
    const choices = {
      environment: this.known.environments,
      why: ["trained", ...this.known.whys],
      finish: this.known.finishs,
      verifier: this.known.verifiers,
      player: this.known.players,
    };
    const asked = FILTERS.filter(([name]) => !FEW.includes(name) || choices[name].length > 1 || this.given[name]);
    const fields = asked.map(([name, label, kind, size]) => {
      const value = this.given[name] ?? "", id = `f-${name}`;
      const input = kind === "select"
        ? el(
          "select",
          { id, name, onchange: () => form.requestSubmit() },
          el("option", { value: "" }, "any"),
          choices[name].map((each) => el("option", { value: each, selected: each === value }, each)),
        )
        : el("input", {
          id,
          name,
          type: kind,
          value,
          step: "any",
          class: size ?? "",
          placeholder: { words: "a word, or the beginning of one*", prompt: "any part of it" }[name] ?? null,
        });
      return el("label", { for: id }, label, input);
    });
    fields.push(
      el(
        "label",
        { for: "f-order" },
        "Order",
        el(
          "select",
          { id: "f-order", name: "order", onchange: () => form.requestSubmit() },
          el("option", { value: "" }, "newest first"),
          Object.entries(ORDERS).map(([value, title]) =>
            el("option", { value, selected: value === this.given.order }, title)
          ),
        ),
      ),
    );
    fields.push(
      el(
        "label",
        { for: "f-rows" },
        "A row is",
        el(
          "select",
          { id: "f-rows", name: "rows", onchange: () => form.requestSubmit() },
          el("option", { value: "" }, "a trajectory"),
          el("option", { value: "groups", selected: this.kind() != null }, "a group"),
        ),
      ),
    );
    const form = el(
      "form",
      {
        class: "noprint",
        "aria-label": "Filter",
        onsubmit: (event) => {
          event.preventDefault();
          location.hash = address("trajectories", {
            run: this.given.run,
            with: this.given.with,
            color: this.given.color,
            ...Object.fromEntries(new FormData(form)),
          });
        },
      },
      el(
        "div",
        { class: "row" },
        fields,
        el("button", { type: "submit" }, "Show"),
        el("a", { href: address("trajectories", { run: this.given.run, with: this.given.with }) }, "no filter"),
      ),
    );
    return form;
  }

  first(run) { // the change of the address that makes another run the first one, and this one of those beside it
    const own = this.given.run ?? "0";
    return run == null || run === own
      ? {}
      : { run, with: [own, ...this.others.map((other) => other.run)].filter((each) => each !== run).join(",") };
  }

  rows(rows, run) {
    const sorted = (name, text) =>
      el("a", {
        href: this.firstPage({ order: this.given.order === name ? `-${name}` : name }),
        title: "order by it",
      }, text);
    const grouped = this.kind() != null;
    const numbers = [
      sorted("length", "tokens"),
      sorted("lag", "lag"),
      sorted("ratio", "ratio"),
      sorted("gap", "gap"),
      sorted("advantage", "advantage"),
    ];
    const head = grouped
      ? [
        "step",
        sorted("reward", "rewards"),
        "mean",
        ...numbers,
        "environment",
        "task",
        "kept",
        "prompt, what was expected",
      ]
      : [
        "step",
        sorted("reward", "reward"),
        ...numbers,
        "ending",
        "environment",
        "task",
        "kept",
        "its group's rewards",
        "prompt, answer, what was expected",
      ];
    const all = rows.flatMap((row) => row.rewards).filter((v) => v != null);
    /** @type {[number, number]} */
    const ends = [Math.min(...all), Math.max(...all)];
    const body = rows.map((row) => {
      const cells = grouped ? this.groupCells(row, ends, run) : this.cells(row, ends, run);
      return el("tr", {}, cells.map((cell) => el("td", {}, cell)));
    });
    return el(
      "div",
      {
        class: "wide",
        tabindex: "0",
        role: "region",
        "aria-label": [
          grouped ? "List of groups" : "List of trajectories",
          this.others.find((other) => other.run === run)?.name,
        ].filter(Boolean).join(", run "),
      },
      el(
        "table",
        { class: "list" },
        el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
        el("tbody", {}, body),
      ),
    );
  }

  open(row, run) { // the address of a row's group, with all of its completions
    return this.to({ ...this.first(run), group: row.group, at: row.key, start: null, direction: null });
  }

  narrow(name, value, text = value) {
    return el("a", {
      href: this.firstPage({ [name]: value, group: null }),
      title: `only ${name} ${value}`,
    }, text);
  }

  cells(row, ends, run) { // of a trajectory
    const href = this.open(row, run);
    return [
      this.narrow("step", row.step, number(row.step)),
      el("a", { href }, number(row.reward)),
      number(row.length),
      number(row.lag),
      number(row.ratio),
      number(row.gap),
      number(row.advantage),
      this.narrow("finish", row.finish),
      this.narrow("environment", row.environment),
      this.narrow("task", row.task),
      this.narrow("why", row.why || "trained"),
      dots(row, ends),
      [
        row.prompt ? el("div", { class: "around", dir: "ltr" }, clean(row.prompt)) : null,
        this.excerpt(row, href),
        this.expected(row),
      ].filter(Boolean),
    ];
  }

  groupCells(row, ends, run) { // of a group, with the text around the words that were asked for
    const href = this.open(row, run);
    return [
      this.narrow("step", row.step, number(row.step)),
      [dots(row, ends), this.unfold(row, run)],
      el("a", { href }, number(row.reward_mean)),
      ...["length", "lag", "ratio", "gap", "advantage"].map((name) => spread(row.ranges[name])),
      this.narrow("environment", row.environment),
      this.narrow("task", row.task),
      this.narrow("why", row.why || "trained"),
      [
        el("a", { class: "excerpt", dir: "ltr", href }, clean(row.prompt || "(empty)")),
        this.given.words ? this.excerpt(row, href) : null,
        this.expected(row),
      ].filter(Boolean),
    ];
  }

  unfold(row, run) { // a button that shows the trajectories of a group below its row, and takes them away again
    let members = [];
    const button = el("button", {
      type: "button",
      class: "unfold",
      "aria-expanded": "false",
      "aria-label": "its trajectories",
      onclick: async () => {
        const open = button.getAttribute("aria-expanded") !== "true";
        button.setAttribute("aria-expanded", String(open));
        button.textContent = open ? "▾" : "▸";
        members.forEach((each) => each.remove());
        if (!open) return;
        const made = await this.members(row, run);
        if (button.getAttribute("aria-expanded") !== "true") return; // folded again meanwhile
        members.forEach((each) => each.remove());
        members = made;
        button.closest("tr").after(...members);
      },
    }, "▸");
    return button;
  }

  async members(row, run) { // rows of the trajectories of a group, the best first
    const { step, environment, task } = row;
    try {
      const { rows } = await ask("rows", {
        run: run ?? this.given.run,
        step,
        environment,
        task,
        why: row.why || "trained",
        limit: MEMBERS,
      });
      const own = rows.filter((each) => each.group === row.group)
        .sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.place - b.place);
      const cells = own.map((each) => {
        const href = this.open(each, run);
        const numbers = [each.length, each.lag, each.ratio, each.gap, each.advantage].map((v) => number(v));
        return [
          "",
          el("a", { href }, number(each.reward)),
          "",
          ...numbers,
          each.finish,
          "",
          "",
          this.excerpt(each, href),
        ];
      });
      const left = row.size - own.length;
      return [
        ...cells.map((some) => el("tr", { class: "member" }, some.map((cell) => el("td", {}, cell)))),
        left > 0
          ? el("tr", { class: "member" }, el("td", { colspan: "12" }, `${number(left)} more are shown with the group.`))
          : null,
      ].filter(Boolean);
    } catch (error) {
      if (error instanceof NeedsToken) this.needsToken();
      return [el("tr", { class: "member" }, el("td", { colspan: "12", role: "alert" }, String(error.message)))];
    }
  }

  expected(row) {
    return row.expected ? el("div", { class: "around", dir: "ltr" }, "expected: ", clean(row.expected)) : null;
  }

  excerpt(row, href) {
    const open = el("a", { class: "excerpt", dir: "ltr", href });
    // deno-lint-ignore no-control-regex
    const parts = (row.excerpt || "(empty)").split(/[\u0002\u0003]/);
    parts.forEach((part, i) => open.append(i % 2 ? el("mark", {}, clean(part)) : clean(part)));
    return open;
  }

  // One group

  async group(given) {
    const only = given.only ?? null, run = given.run;
    const [found, life, before, after] = await Promise.all([
      ask("group", { run, key: given.group, only, begin: given.begin }),
      this.life(given.group, run),
      this.beside("newer"),
      this.beside("older"),
    ]);
    const color = COLORINGS[given.color] ? given.color : "lag",
      beside = await Promise.all(this.others.map((other) => this.counterpart(other, found)));
    const most = scaleOf(color, [found, ...beside.map((one) => one.found).filter(Boolean)]);
    const link = (
      row,
      text,
      rel,
    ) => (row
      ? el("a", { rel, href: this.to({ group: row.group, at: row.key, only: null, begin: null }) }, text)
      : el("span", { class: "soft" }, text));
    this.steps = { before, after };
    const colors = el(
      "span",
      { class: "group", role: "group", "aria-label": "Colour of tokens" },
      Object.entries(COLORINGS).map(([name, { title }]) =>
        el("button", {
          type: "button",
          "aria-pressed": String(name === color),
          onclick: () => {
            location.hash = this.to({ color: name });
          },
        }, title)
      ),
    );
    const bar = el(
      "p",
      { class: "bar noprint" },
      el("a", { href: this.to({ group: null, at: null, only: null, begin: null }) }, "▲ list"),
      link(before, "◀ newer", "prev"),
      link(after, "older ▶", "next"),
      el("span", { class: "soft" }, "inside of the filter; keys: j, k, u"),
    );
    const shades = [el("div", { class: "bar noprint" }, colors), legend(color, most)];
    if (!beside.length) return [bar, ...this.head(found, life), ...shades, ...this.body(found, color, most)];
    const columns = [{ name: this.name, found, life }, ...beside].map((one) =>
      section(
        one.name,
        one.found
          ? [one.note, ...this.head(one.found, one.life, one.run), ...this.body(one.found, color, most, one.run)]
            .filter(Boolean)
          : [one.note],
      )
    );
    return [bar, ...shades, side(columns)];
  }

  // The group of the same task in another run: of the same step, else of the next one before it, else the newest.
  async counterpart(other, { environment, task, step }) {
    const asked = { run: other.run, environment, task, limit: 1 };
    for (const more of [{ step }, { max_step: step }, {}]) {
      const { rows: [row] } = await ask("rows", { ...asked, ...more });
      if (!row) continue;
      const note = row.step === step ? null : el(
        "p",
        { class: "soft" },
        `No group of this task is kept of its step ${number(step)}: this one is of step ${number(row.step)}.`,
      );
      const [found, life] = await Promise.all([
        ask("group", { run: other.run, key: row.group }),
        this.life(row.group, other.run),
      ]);
      return { ...other, note, found, life };
    }
    const same = el("a", {
      href: this.to({ ...this.first(other.run), group: null, at: null, only: null, begin: null, step }),
    }, `what it keeps of step ${number(step)}`);
    return { ...other, found: null, note: el("p", { class: "soft" }, "It keeps no group of this task: ", same) };
  }

  async life(key, run) { // where the time of a group went; without it the group is shown all the same
    try {
      return await ask("life", { run, key });
    } catch (error) {
      if (error instanceof NeedsToken) throw error;
      return null;
    }
  }

  head(found, life, run) {
    const facts = [
      `step ${number(found.step)}`,
      found.environment,
      `task ${found.task}`,
      `lease ${found.lease}`,
      `${found.size} trajectories`,
      `reward ${number(found.reward_mean)} ± ${number(found.reward_std)}`,
      found.greedy_reward == null ? "" : `greedy answer ${number(found.greedy_reward)}`,
    ].filter(Boolean);
    const uniform = new Set(found.trajectories.map((one) => one.reward)).size === 1;
    const task = { environment: found.environment, task: found.task };
    return [
      el(this.others.length ? "h3" : "h2", {}, facts.join(" · ")),
      el(
        "p",
        { class: "noprint" },
        el(
          "a",
          { href: address("trajectories", { run: this.given.run, with: this.given.with, ...task }) },
          "this task at all steps",
        ),
        " · ",
        el(
          "a",
          {
            href: address("trajectories", { run: run ?? this.given.run, with: this.given.with, ...task, same: "some" }),
          },
          "this task at other steps, with the differences",
        ),
      ),
      found.why ? el("p", { class: "slow" }, `It was left out of training: ${found.why}`) : null,
      uniform && found.trajectories.length > 1
        ? el("p", { class: "slow" }, "All rewards are equal: nothing is learned from the spread of this group.")
        : null,
      life ? lanes(life, found.trajectories.find((one) => one.key === this.given.at)?.place) : null,
    ].filter(Boolean);
  }

  body(found, color, most, run) { // the prompt once, and the trajectories, the best first
    const ranked = [...found.trajectories].sort((a, b) =>
      (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.place - b.place
    );
    return [
      el(
        "details",
        { class: "card", open: found.shared < 400 },
        el("summary", {}, `Prompt, ${number(found.shared)} tokens, the same for all`),
        el("div", { class: "tokens given", dir: "ltr" }, clean(found.prompt)),
        asText(found.group, run ?? this.given.run),
      ),
      el("div", { class: "siblings" }, ranked.map((one, i) => this.card(one, found, color, most, i, run))),
    ];
  }

  async beside(direction) { // the next trajectory of another group, inside of the filter
    if (!this.given.at) return null;
    const { rows } = await ask("rows", { ...this.filter(), start: this.given.at, direction, limit: 20 });
    const others = rows.filter((row) => row.group !== this.given.group);
    return (direction === "newer" ? others.at(-1) : others[0]) ?? null;
  }

  card(one, found, color, most, rank, run) {
    const count = found.trajectories.length,
      place = rank === 0 ? "best" : rank === count - 1 ? "worst" : `${rank + 1} of ${count}`,
      { reward, turns, spans, advantage, player } = one.facts;
    const versions = [...new Set(spans.map(([version]) => version))];
    const head = [
      `${place}: reward ${number(one.reward)}`,
      `${number(one.length)} tokens`,
      one.finish,
      `lag ${number(one.lag)}`,
      versions.length > 1 ? `versions ${versions.join(", ")}` : `version ${versions[0] ?? "–"}`,
      advantage == null ? null : `advantage ${number(advantage)}`,
      turns.length > 1 ? `${turns.length} turns` : null,
      wayOf(one) ? `way ${wayOf(one)}` : null,
      player || null,
    ];
    const more = Object.entries(reward).filter(([name, value]) =>
      !["reward", "components"].includes(name) && value !== "" && value != null
    );
    const from = (begin, text) =>
      el("a", { href: this.to({ ...this.first(run), group: found.group, at: one.key, only: one.place, begin }) }, text);
    const open = from(null, `${number(one.total)} tokens: show them`),
      part = one.tokens && this.part(one, found, from),
      file = asText(found.group, run ?? this.given.run, one.place);
    return el(
      "article",
      {
        class: `card${run == null && one.key === this.given.at ? " chosen" : ""}`,
        "aria-label": `${place}, reward ${one.reward}`,
      },
      el("h3", {}, head.filter(Boolean).join(" · ")),
      Object.keys(reward.components ?? {}).length
        ? el(
          "p",
          { class: "soft" },
          Object.entries(reward.components).map(([name, value]) => `${clean(name.slice(0, 100))} ${number(value)}`)
            .join(" · "),
        )
        : null,
      one.tokens
        ? el("div", {}, part, strip(one, found, color, most))
        : el("div", {}, open, file, one.text ? el("div", { class: "tokens", dir: "ltr" }, clean(one.text)) : null),
      el(
        "details",
        {},
        el("summary", {}, "Reward and turns"),
        one.tokens ? file : null,
        el(
          "dl",
          { class: "facts" },
          more.flatMap((
            [name, value],
          ) => [
            el("dt", {}, name),
            el(
              "dd",
              {},
              name === "latency_s" ? seconds(value) : clean(typeof value === "string" ? value : JSON.stringify(value)),
            ),
          ]),
          turns.flatMap((
            turn,
            i,
          ) => [
            el("dt", {}, `turn ${i + 1}`),
            el(
              "dd",
              {},
              `tokens ${turn.completion_start} to ${turn.end}, ${turn.finish_reason}, by ${
                turn.generator_ids.join(", ")
              }${turn.reward == null ? "" : `, reward ${number(turn.reward)}`}`,
            ),
          ]),
        ),
      ),
    );
  }

  // Of one that is too long to be shown at once: where this part is, and the ways to the others.
  part({ tokens, total }, { shared }, from) {
    const end = tokens.begin + tokens.pieces.length, size = tokens.pieces.length;
    if (tokens.begin === shared && end === total) return null;
    return el(
      "p",
      { class: "bar" },
      tokens.begin > shared ? from(Math.max(shared, tokens.begin - size), "◀ earlier tokens") : null,
      el("span", { class: "soft" }, `tokens ${number(tokens.begin)} to ${number(end)} of ${number(total)}`),
      end < total ? from(end, "later tokens ▶") : null,
    );
  }

  key(event) {
    if (
      !this.given.group || this.target.hidden || event.ctrlKey || event.metaKey || event.altKey ||
      /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)
    ) return;
    const row = { j: this.steps?.after, k: this.steps?.before }[event.key];
    if (row) location.hash = this.to({ group: row.group, at: row.key, only: null, begin: null });
    if (event.key === "u") location.hash = this.to({ group: null, at: null, only: null, begin: null });
  }
}
