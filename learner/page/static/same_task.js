// Completions of one task at several steps beside each other, each with its differences from the one before it.
import { ask, el, number } from "./dom.js";
import { clean } from "./tokens.js";

const SOME = "some"; // the address then names no steps: the first, the middle and the last one are shown
const MOST = 5;
const MEMBERS = { best: "the best of its group", worst: "the worst of its group", first: "the first of its group" };
const KINDS = { same: "span", gone: "del", new: "ins" };

function choice(id, label, options, chosen, changed) {
  const input = el(
    "select",
    { id, onchange: () => changed(input.value) },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)),
  );
  return el("label", { for: id }, `${label} `, input);
}

function column(one, i, shown, choices, go, to) {
  const steps = shown.map(({ step }) => step);
  const options = choices.map((
    { step, reward_mean },
  ) => [String(step), `${number(step)}: mean ${number(reward_mean)}`]);
  if (!options.some(([value]) => value === String(one.step))) options.unshift([String(one.step), number(one.step)]);
  const facts = [
    `reward ${number(one.reward)}, mean of ${number(one.size)} ${number(one.reward_mean)}`,
    `${number(one.length)} tokens`,
    one.finish,
    `lag ${number(one.lag)}`,
    `version ${one.versions.join(", ") || "–"}`,
    one.why || null,
  ];
  const open = to({
    same: null,
    steps: null,
    member: null,
    task: null,
    environment: null,
    group: one.group,
    at: one.key,
  });
  return el(
    "section",
    { "aria-label": `Step ${one.step}` },
    el(
      "p",
      { class: "bar noprint" },
      choice(`same-${i}`, "Step", options, String(one.step), (value) => go(steps.with(i, Number(value)))),
      shown.length > 1
        ? el("button", { type: "button", onclick: () => go(steps.toSpliced(i, 1)) }, `without step ${one.step}`)
        : null,
    ),
    el("h3", {}, el("a", { href: open }, `Step ${number(one.step)}`)),
    el("p", { class: "soft" }, facts.filter(Boolean).join(" · ")),
    el(
      "div",
      {
        class: "tokens difference",
        dir: "ltr",
        tabindex: "0",
        role: "group",
        "aria-label": `Text of step ${one.step}`,
      },
      one.parts.map(([kind, text]) => el(KINDS[kind], {}, clean(text))),
      one.parts.length ? null : "(empty)",
    ),
    one.cut ? el("p", { class: "soft" }, `${number(one.cut)} more characters are neither shown nor compared.`) : null,
  );
}

// What the address asks for; `to` makes the address of a change of it.
export async function sameTask(given, to) {
  const { environment, task } = given, member = MEMBERS[given.member] ? given.member : "best";
  const asked = given.same === SOME ? null : given.same;
  const found = await ask("same_task", { run: given.run, environment, task, steps: asked, member });
  const go = (steps) => {
    location.hash = to({ same: [...new Set(steps)].sort((a, b) => a - b).join(",") });
  };
  const { shown, choices } = found, steps = shown.map(({ step }) => step);
  const more = choices.map(({ step }) => step).filter((step) => !steps.includes(step));
  const prompts = new Set(shown.map(({ prompt }) => prompt));
  return [
    el(
      "p",
      { class: "bar noprint" },
      el("a", { href: to({ same: null, member: null }) }, "▲ this task at all steps"),
      choice(
        "same-member",
        "Shown is",
        Object.entries(MEMBERS),
        member,
        (value) => {
          location.hash = to({ member: value === "best" ? null : value });
        },
      ),
      more.length && shown.length < MOST
        ? choice(
          "same-more",
          "One more step",
          [["", "none"], ...more.map((step) => [String(step), number(step)])],
          "",
          (value) => value && go([...steps, Number(value)]),
        )
        : null,
    ),
    el("h2", {}, `${environment} · task ${task} at ${number(shown.length)} of ${number(choices.length)} kept steps`),
    ...found.unreadable.map((text) => el("p", { role: "alert" }, `cannot be read: ${text}`)),
    shown.length ? null : el("p", {}, "No group of this task is kept."),
    ...[...prompts].map((prompt) => el("div", { class: "tokens given", dir: "ltr" }, clean(prompt || "(no prompt)"))),
    shown.length > 1
      ? el(
        "p",
        { class: "soft" },
        "Against the step before it: ",
        el("ins", {}, "new words"),
        ", ",
        el("del", {}, "gone ones"),
        ".",
      )
      : null,
    el("div", { class: "runs" }, shown.map((one, i) => column(one, i, shown, choices, go, to))),
  ].filter(Boolean);
}
