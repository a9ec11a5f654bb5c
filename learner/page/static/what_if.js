// What if: a form of the run's settings, the trainings by other ones that it began, and what came out of one of them.
import { address, ask, css, el, NeedsToken, number, share, table } from "./dom.js";

const EVERY_MS = 1500;
const PHASES = { run: "by the run's own settings", "what-if": "by the other settings", done: "done" };
const WHAT = "It trains the run's own batches again by other settings, beside the run and from what the machine has " +
  "left. The samples stay those of the run: from the first step that differs on, the curves say what the settings do " +
  "to the learning from given data, and not how a run by them would go.";

async function send(path, body) { // a body that says it is JSON: no page of another origin can send that
  const answer = await fetch(`/page/${path}`, {
    method: "POST",
    credentials: "same-origin",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (answer.status === 401) throw new NeedsToken();
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error?.message ?? `HTTP ${answer.status}`);
  return told;
}

export class WhatIf {
  constructor(target, { needsToken }) {
    this.needsToken = needsToken;
    this.run = null;
    this.turn = 0;
    this.told = "";
    /** @type {uPlot[]} */
    this.plots = [];
    this.form = el("div", {});
    this.refusal = el("p", { role: "alert", id: "what-if-refusal" });
    this.list = el("div", { id: "what-ifs" });
    this.result = el("div", { id: "what-if-result" });
    const head = [el("h2", {}, "What if"), el("p", { class: "soft" }, WHAT)];
    target.append(...head, this.form, this.refusal, this.list, this.result);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawn?.());
  }

  async show(given) {
    const run = given.run ?? "0", turn = ++this.turn;
    this.given = given;
    clearTimeout(this.timer);
    if (this.run !== run && !(await this.build(run, turn))) return;
    await this.follow(turn).catch((error) => this.lost(error, turn)); // the form stays, with what is typed in it
  }

  async build(run, turn) { // false while there is no form, or once another one is wanted
    this.clear();
    try {
      const form = await ask("what_if_form", { run });
      if (turn !== this.turn) return false;
      this.form.replaceChildren(...this.fields(form));
      this.run = run;
      return true;
    } catch (error) {
      if (error instanceof NeedsToken) this.needsToken();
      else if (turn === this.turn) {
        this.form.replaceChildren(el("p", { role: "alert" }, String(error.message)));
        this.timer = setTimeout(() => this.show(this.given), EVERY_MS);
      }
      return false;
    }
  }

  hide() {
    this.turn++;
    clearTimeout(this.timer);
  }

  clear() {
    this.run = null;
    this.told = "";
    this.refusal.textContent = "";
    this.shown = null;
    this.drawn = null;
    for (const each of this.plots.splice(0)) each.destroy();
    for (const each of [this.form, this.list, this.result]) each.replaceChildren();
  }

  // The form

  fields({ fields, refused }) { // only what differs from the run is sent
    const own = fields.map((field) => ({ field, input: input(field) })),
      changed = () => own.filter(({ field, input }) => !input.disabled && input.value.trim() !== field.value);
    const type = own.find(({ field }) => field.key === "algo.type"),
      of = (usual) =>
        el(
          "div",
          { class: "settings" },
          own.filter(({ field }) => field.usual === usual).map(({ field, input }) => labelled(field, input)),
        );
    const others = () => { // those of the run's algorithm are not those of another one
      for (const { field, input } of own) {
        if (field.key.startsWith("algo.") && field.key !== "algo.type") {
          input.disabled = type.input.value !== type.field.value;
        }
      }
    };
    type?.input.addEventListener("change", others);
    const find = el("input", {
      type: "search",
      id: "what-if-find",
      class: "text",
      placeholder: "a part of its name",
      oninput: () => {
        for (const { field, input } of own) {
          input.closest("label").hidden = !field.key.includes(find.value.trim().replaceAll("-", "_"));
        }
      },
    });
    const groups = el("input", { type: "checkbox", id: "what-if-groups", checked: true }),
      version = el("input", { type: "number", id: "what-if-version", min: "0", placeholder: "the oldest" }),
      error = el("p", { role: "alert", id: "what-if-error" }, refused);
    const submitted = async (event) => {
      event.preventDefault();
      const changes = changed().map(({ field, input }) => `${field.key}=${input.value.trim()}`);
      error.textContent = changes.length ? "" : "Nothing is changed yet: give one of the settings another value.";
      if (changes.length) await this.start(changes, groups.checked, version.value, error);
    };
    return [
      el(
        "form",
        { class: "noprint", "aria-label": "Settings of a what-if", onsubmit: submitted },
        el("label", { for: "what-if-find" }, "Find a setting ", find),
        of(true),
        el("details", {}, el("summary", {}, "More settings"), of(false)),
        el(
          "div",
          { class: "row" },
          el("label", { for: "what-if-version" }, "Begin with version", version),
          el("label", { for: "what-if-groups" }, "Compare groups, twice the time", groups),
          el("button", { type: "submit", disabled: !fields.length }, "Train by these settings"),
        ),
        error,
      ),
    ];
  }

  async start(changes, groups, version, error) {
    const run = Number(this.run);
    this.refusal.textContent = "";
    try {
      const { name } = await send("what_if", {
        run,
        changes,
        groups,
        version: version === "" ? null : Number(version),
      });
      const wanted = address("what-if", { run: this.given.run, with: this.given.with, what: name });
      if (location.hash === wanted) this.show(this.given);
      else location.hash = wanted;
    } catch (refused) {
      if (refused instanceof NeedsToken) return this.needsToken();
      error.textContent = String(refused.message);
    }
  }

  // Those that are there

  async follow(turn) {
    const all = await ask("what_ifs", { run: this.run, name: this.given.what });
    if (turn !== this.turn) return;
    const told = JSON.stringify([all, this.given.what]);
    if (told !== this.told) this.list.replaceChildren(...this.rows(all)); // or what has the focus would lose it
    this.told = told;
    const chosen = all.find(({ name }) => name === this.given.what) ?? (this.given.what ? null : all[0]);
    await this.showResult(chosen, turn);
    if (turn !== this.turn || !all.some(({ state }) => state === "running")) return;
    this.timer = setTimeout(() => this.follow(turn).catch((error) => this.lost(error, turn)), EVERY_MS);
  }

  lost(error, turn) {
    if (error instanceof NeedsToken) return this.needsToken();
    if (turn !== this.turn) return;
    this.told = "";
    this.list.replaceChildren(el("p", { role: "alert" }, String(error.message)));
    this.timer = setTimeout(() => this.follow(turn).catch((again) => this.lost(again, turn)), EVERY_MS);
  }

  rows(all) {
    return all.map((one) =>
      el(
        "article",
        { class: "card what-if", "aria-label": one.name, "aria-current": one.name === this.given.what ? "true" : null },
        el(
          "h3",
          {},
          el(
            "a",
            { href: address("what-if", { run: this.given.run, with: this.given.with, what: one.name }) },
            one.name,
          ),
          one.changes.length ? ` · ${one.changes.join("; ")}` : "",
        ),
        one.state === "running" ? this.progress(one) : null,
        one.state === "ended" ? el("p", { class: "slow" }, `It ended before it was done${at(one.progress)}.`) : null,
        one.state === "ended" && one.why
          ? el("details", { open: true }, el("summary", {}, "What it said last"), el("pre", { class: "log" }, one.why))
          : null,
      )
    );
  }

  progress({ name, progress }) {
    return el(
      "p",
      { class: "bar" },
      el("progress", {
        max: String(progress?.steps ?? 1),
        value: String(progress?.trained ?? 0),
        "aria-label": `Progress of ${name}`,
      }),
      el("span", {}, progress ? `training ${PHASES[progress.phase]}${at(progress)}` : "starting"),
      el("button", { type: "button", onclick: () => this.stop(name) }, "Stop it"),
    );
  }

  async stop(name) {
    const turn = this.turn;
    this.refusal.textContent = "";
    try {
      await send("what_if/stop", { run: Number(this.run), name });
    } catch (error) {
      if (error instanceof NeedsToken) return this.needsToken();
      if (turn === this.turn) this.refusal.textContent = String(error.message);
    }
    if (turn === this.turn) this.show(this.given);
  }

  // What came out

  async showResult(chosen, turn) {
    const unknown = chosen ? null : this.given.what;
    const key = chosen ? `${this.run}/${chosen.name}/${chosen.state}` : unknown;
    if (this.shown === key) return;
    const found = chosen && chosen.state !== "running" && chosen.progress
      ? await ask("what_if", { run: this.run, name: chosen.name })
      : null;
    if (turn !== this.turn) return;
    for (const each of this.plots.splice(0)) each.destroy();
    this.shown = key;
    this.drawn = null;
    const missing = unknown ? [el("p", { role: "alert" }, `${unknown} is no what-if of this run, or no longer.`)] : [];
    this.result.replaceChildren(...(found ? this.outcome(chosen.name, found) : missing));
    if (found) {
      this.drawn = () => this.draw(found);
      this.draw(found);
    }
  }

  outcome(name, found) {
    const { steps, first_apart, unlike, compared_groups, phase, trained } = found;
    const range = () => `${number(steps[0])} to ${number(steps.at(-1))}`;
    const begun = !trained
      ? "It ended before it had trained a step by the other settings."
      : !steps.length
      ? "The run has no numbers of these steps to compare with."
      : first_apart != null
      ? `Steps ${range()}: the first that differs is step ${number(first_apart)}.`
      : phase === "done"
      ? "No number of any step differs: these settings change nothing here."
      : `No number of the steps ${range()} differs. It ended before it had trained the others.`;
    const again = !compared_groups
      ? null
      : unlike
      ? `The run's own settings do not give its numbers here, so differences as small as this one say nothing: ${unlike}`
      : steps.length && phase !== "run" // in that phase not all of it had been trained again
      ? "Trained here by its own settings, the run gives its numbers again, digit for digit."
      : null;
    return [
      el("h2", {}, `${name}: ${found.changes.join("; ")}`),
      el("p", { id: "what-if-begun" }, begun),
      again ? el("p", { class: unlike ? "slow" : "soft" }, again) : null,
      el(
        "div",
        { class: "charts", id: "what-if-charts" },
        found.curves.map(({ name, title }) =>
          el(
            "figure",
            { "aria-label": title, "data-name": name },
            el("h3", {}, title),
            el("div", { class: "plot" }),
          )
        ),
      ),
      found.same.length && found.curves.length
        ? el("p", { class: "soft" }, `The same at every step: ${found.same.join(", ")}.`)
        : null,
      ...(found.group_count ? this.groups(found) : []),
      el("p", { class: "soft" }, found.caveat),
    ].filter(Boolean);
  }

  draw({ steps, curves }) {
    for (const each of this.plots.splice(0)) each.destroy();
    const axis = (more = {}) => ({
      stroke: () => css("--soft"),
      grid: { stroke: () => css("--line"), width: 1 },
      ticks: { stroke: () => css("--line") },
      font: "12px system-ui, sans-serif",
      ...more,
    });
    for (const { name, run, now } of curves) {
      const box = [...this.result.querySelectorAll("figure")].find((each) => each.dataset.name === name)
        .querySelector(".plot");
      const line = (label, color, dash) => ({
        label,
        stroke: () => css(color),
        width: 1.5,
        dash,
        value: (_, v) => number(v),
      });
      const options = {
        width: box.clientWidth || 480,
        height: 170,
        legend: { live: true },
        scales: { x: { time: false } },
        axes: [axis(), axis({ size: 56, values: (_, ticks) => ticks.map((v) => number(v)) })],
        series: [
          { label: "step", value: (_, v) => number(v) },
          line("run", "--blue"),
          line("what if", "--orange", [7, 4]),
        ],
      };
      this.plots.push(new uPlot(options, [steps, run, now], box));
    }
  }

  groups(found) {
    const so_far = found.phase === "done" ? "" : " in the steps that were trained";
    if (!found.groups.length) {
      return [el("p", { id: "what-if-groups-none" }, `No group's pull on the policy changed${so_far}.`)];
    }
    const grid = el("table", { class: "list" });
    table(
      grid,
      [
        "group",
        "step",
        "environment",
        "task",
        "rewards",
        "change",
        "pull: run",
        "what if",
        "clipped: run",
        "what if",
        "|advantage|: run",
        "what if",
      ],
      found.groups.map((one) => [
        this.link(one),
        number(one.step),
        one.environment,
        number(one.task_index),
        one.rewards.slice(0, 16).map((v) => number(v)).join(", ") + (one.rewards.length > 16 ? ", …" : ""),
        one.pull_change == null ? "not finite" : number(one.pull_change),
        number(one.pull_run),
        number(one.pull),
        share(one.clipped_share_run),
        share(one.clipped_share),
        number(one.advantage_run),
        number(one.advantage),
      ]),
    );
    const more = found.changed_count - found.groups.length;
    return [
      el("h3", {}, "Groups whose pull on the policy changed"),
      el(
        "p",
        { class: "soft" },
        `${number(found.changed_count)} of ${number(found.group_count)} groups, those that changed most first${
          more > 0 ? `; ${number(more)} more are in groups.jsonl of its folder` : ""
        }.`,
      ),
      el(
        "div",
        {
          class: "wide",
          id: "what-if-groups-table",
          tabindex: "0",
          role: "region",
          "aria-label": "Groups that changed",
        },
        grid,
      ),
    ];
  }

  link({ key, step, lease_id, environment, task_index }) { // of one that is not kept, to what is kept of its step
    const run = { run: this.given.run };
    return key ? el("a", { href: address("trajectories", { ...run, group: key }) }, `lease ${lease_id}`) : el(
      "a",
      { href: address("trajectories", { ...run, step, environment, task: task_index }), title: "it is not kept" },
      `lease ${lease_id}, not kept`,
    );
  }
}

const at = (progress) => progress ? `, step ${number(progress.trained)} of ${number(progress.steps)}` : "";

function input({ key, value, choices }) {
  const id = `set-${key}`;
  if (!choices.length) return el("input", { id, name: key, class: "text", value, spellcheck: "false" });
  const all = choices.includes(value) ? choices : [value, ...choices];
  return el(
    "select",
    { id, name: key },
    all.map((each) => el("option", { value: each, selected: each === value }, each)),
  );
}

function labelled({ key, help, value, default: usual }, input) {
  const other = usual && usual !== value ? ` Usually ${usual}.` : "";
  return el("label", { for: input.id, title: `${help}${other}` }, key, input);
}
