// The page of a server of training loops: tenants, their runs, who waits for whom, and the curves of the chosen runs.
import { Charts } from "./charts.js";
import { crowd } from "./crowd.js";
import { $, address, ask, el, NeedsToken, number, place, seconds, table } from "./dom.js";
import { listenForLogin } from "./login.js";
import { memory } from "./machines.js";

const EVERY_MS = 2000;
const MOST_CHOSEN = 5; // runs beside each other: there are as many colours

const said = (text) => {
  if ($("state").textContent !== text) $("state").textContent = text;
};

// A column: its title, the value that it is sorted by, and what is shown of it.
const TENANT_COLUMNS = [
  ["tenant", (one) => one.name],
  ["runs", (one) => one.runs],
  ["operations wait", (one) => one.queued, (one) => of(one.queued, one.queue_limit)],
  ["their bytes", (one) => one.queued_bytes, (one) => `${memory(one.queued_bytes)} of ${memory(one.bytes_limit)}`],
  ["first waits", (one) => one.waits_s, (one) => seconds(one.waits_s)],
  ["completions", (one) => one.completions, (one) => of(one.completions, one.completion_limit)],
  ["refused in a minute", (one) => one.refused],
  ["rows/s", (one) => one.rows_per_s],
];
const RUN_COLUMNS = [
  ["run", (one) => one.name, (one) => chooser(one)],
  ["title", (one) => one.title],
  ["rank", (one) => one.rank],
  ["steps", (one) => one.steps],
  ["operations wait", (one) => one.queued],
  ["waits for", (one) => one.waits_for],
  ["since", (one) => one.since_s, (one) => seconds(one.since_s)],
  ["rows/s", (one) => one.rows_per_s],
  ["tokens/s", (one) => one.tokens_per_s],
  ["loss, a row", (one) => one.loss],
  ["is in", (one) => one.place],
];

const of = (value, limit) => `${number(value)} of ${number(limit)}`;

class TenantCharts extends Charts {
  /** The samples are with the client: no point leads to them. @override */
  lead() {}
}

/** @type {TenantsTold | null} */
let told = null;
/** @type {TenantCharts | null} */
let charts = null;
let timer = 0, turn = 0, drawn = "";
/** @type {ShownRun & { others: ShownRun[] }} */
const shown = { name: "", columns: { step: [], lags: [] }, events: [], marks: [], others: [] };

function needsToken() {
  clearTimeout(timer);
  said("a key is wanted");
  $("view-tenants").hidden = true;
  $("view-login").hidden = false;
  $("token").focus();
}

// Which runs are drawn: those of the address, or the first one that has a curve.
function chosen() {
  const there = new Set(told.with_curves), given = place().given.runs;
  if (given != null) return given.split(",").filter((name) => there.has(name));
  const first = told.runs.find((one) => there.has(one.name));
  return first ? [first.name] : [];
}

function choose(name) {
  const names = chosen(), without = names.filter((each) => each !== name);
  const wanted = names.length === without.length ? [...names, name].slice(-MOST_CHOSEN) : without;
  remember({ runs: wanted.join(",") || "none" });
}

function remember(given) {
  history.replaceState(null, "", address("run", { ...place().given, ...given }));
  show();
  drawCurves();
}

function chooser(one) {
  if (!told.with_curves.includes(one.name)) return one.name;
  const pressed = String(chosen().includes(one.name));
  return el(
    "button",
    { type: "button", "data-key": `run ${one.name}`, "aria-pressed": pressed, onclick: () => choose(one.name) },
    one.name,
  );
}

// A table whose heads sort it; which one does is in the address.
function sorted(id, columns, rows) {
  const order = `order_${id}`,
    [by, down] = (place().given[order] ?? "").split("~"),
    at = columns.findIndex(([title]) => title === by);
  const ordered = at < 0 ? rows : [...rows].sort((a, b) => {
    const [x, y] = [a, b].map(columns[at][1]);
    if (x == null || y == null) return Number(x == null) - Number(y == null); // what is not known comes last
    return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
  });
  const head = columns.map(([title], i) =>
    el("button", {
      type: "button",
      class: "head",
      "data-key": `${id} ${title}`, // numbers begin with the largest, texts with the first
      onclick: () =>
        remember({
          [order]: i === at ? `${title}${down ? "" : "~down"}` : `${title}${isText(rows, columns[i]) ? "" : "~down"}`,
        }),
    }, title)
  );
  const target = $(id), focused = target.contains(document.activeElement) ? document.activeElement : null;
  const key = /** @type {HTMLElement | null} */ (focused)?.dataset.key;
  table(target, head, ordered.map((one) => columns.map(([, value, cell]) => cell ? cell(one) : number(value(one)))));
  if (at >= 0) target.querySelectorAll("th")[at].setAttribute("aria-sort", down ? "descending" : "ascending");
  if (key) {
    [.../** @type {NodeListOf<HTMLElement>} */ (target.querySelectorAll("[data-key]"))]
      .find((each) => each.dataset.key === key)?.focus(); // what the reader has in hand stays there
  }
}

const isText = (rows, [, value]) => rows.length > 0 && typeof value(rows[0]) === "string";

function show() {
  $("name").textContent = told.viewer ? `${told.name}, as ${told.viewer} sees it` : told.name;
  document.title = `${told.queued ? `${number(told.queued)} wait · ` : ""}Headway`;
  const { verdict } = told, text = `${verdict.sentence}${verdict.remedy ? `; ${verdict.remedy}` : ""}`;
  $("verdict").hidden = false;
  $("verdict").className = verdict.state;
  if ($("verdict").textContent !== text) $("verdict").textContent = text;
  tiles();
  processes();
  sorted("tenants", TENANT_COLUMNS, told.tenants);
  sorted("runs", RUN_COLUMNS, told.runs);
  $("tenants-note").textContent = told.tenant_count > told.tenants.length
    ? `The busiest ${number(told.tenants.length)} of ${number(told.tenant_count)}.`
    : "";
  const rest = told.run_count - told.runs.filter((one) => one.place !== "unloaded").length;
  $("runs-note").textContent = rest > 0
    ? `The ${number(told.runs.length)} with the most to do, or used last; ${number(rest)} more are kept.`
    : told.runs.length
    ? ""
    : "No run yet.";
}

function tiles() {
  const tiles = [
    ["Base model", told.base_model.split("/").slice(-2).join("/"), ""],
    ["Clients", number(told.clients), "there"],
    ["Runs", number(told.run_count), `${number(told.resident)} in memory`],
    ["Operations", number(told.queued), "wait"],
    ["Completions", number(told.completions), "under way"],
    ["Tokens", number(told.tokens_per_s), "trained a second"],
  ];
  $("tiles").replaceChildren(
    ...tiles.map(([name, value, more]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value, " ", el("small", {}, more)))
    ),
  );
}

function card(place, title, lines) {
  return el(
    "div",
    { class: `card ${place}` },
    el("h3", {}, title),
    el("ul", {}, lines.map(([text, state]) => el("li", { class: state ?? "" }, text))),
  );
}

function processes() {
  const call = told.at_work, silent = told.generator_silent_s, waiting = told.runs.filter((one) => one.queued > 0);
  const trainer = call
    ? [
      [`${call.tenant}: ${call.kind || "a call"}, for ${seconds(call.since_s)}`, call.since_s > 15 ? "slow" : "ok"],
      ...(call.tokens ? [[`${number(call.tokens)} tokens in ${number(call.rows)} rows`, ""]] : []),
      ...(call.sharing > 1 ? [[`${number(call.sharing)} operations share its turn`, ""]] : []),
    ]
    : [["has nothing in hand", "ok"]];
  const queue = [
    [`${number(told.queued)} operations wait`, told.queued ? "slow" : "ok"],
    ...waiting.slice(0, 5).map((one) => [`${one.name}: ${one.waits_for}, ${seconds(one.since_s)}`, ""]),
    ...(waiting.length > 5 ? [[`and ${number(waiting.length - 5)} more runs`, ""]] : []),
  ];
  const state = (one) => (one.state === "answers" ? "ok" : one.state === "not called yet" ? "" : "gone");
  const generators = told.peers
    ? told.peers.length ? crowd(told.peers, (one) => [`${one.name}: ${peerText(one)}`, state(one)]) : [["none", ""]]
    : [[`${number(told.generators)} generators`, ""]];
  const sampling = [
    [`${number(told.completions)} completions under way`, silent != null && silent > 15 ? "gone" : ""],
    ...(silent != null && silent > 1 ? [[`no word of a generator for ${seconds(silent)}`, "slow"]] : []),
  ];
  const unfolded = [...$("processes").querySelectorAll("details")].map((one) => one.open);
  $("processes").replaceChildren(
    card("queue", "Queue", queue),
    card("trainer", "Trainer", trainer),
    card("generators", "Generators", [...generators, ...sampling]),
  );
  [...$("processes").querySelectorAll("details")].forEach((one, i) => one.open = unfolded[i] ?? false);
}

const peerText = (one) =>
  [
    one.state,
    one.tokens_per_s != null ? `${number(one.tokens_per_s)} tokens/s` : "",
    one.last_heard_s > 5 ? `heard ${seconds(one.last_heard_s)} ago` : "",
  ].filter((text) => text).join(", ");

async function drawCurves() {
  const names = chosen(), mine = ++turn;
  $("curves-note").textContent = names.length
    ? "A press on a run's name above draws it, or takes it away."
    : told.with_curves.length
    ? "Press on a run's name above to draw its curves."
    : "A run has curves from its first optimizer step on.";
  const found = names.length ? await curvesOf(names) : { figures: [], runs: [] };
  if (mine !== turn || !found) return;
  const [first, ...others] = found.runs.map((one) => ({ ...one, events: [], marks: [] }));
  Object.assign(shown, first ?? { name: "", columns: { step: [], lags: [] } }, { others });
  if (!charts) {
    charts = new TenantCharts(shown, found.figures, []);
    charts.look(place().given);
  }
  const now = JSON.stringify([found.figures.map((each) => each.id), names]);
  if (now !== drawn) charts.have(found.figures);
  drawn = now;
  charts.update();
}

async function curvesOf(names) {
  try {
    return await ask("tenant_curves", names.map((name) => ["run", name]));
  } catch (error) {
    if (error instanceof NeedsToken) needsToken();
    return null; // a run that was forgotten meanwhile is not among those of the next look
  }
}

async function look() {
  clearTimeout(timer);
  try {
    told = await ask("tenants");
    $("view-login").hidden = true;
    $("view-tenants").hidden = false;
    show();
    said("live");
    await drawCurves();
  } catch (error) {
    if (error instanceof NeedsToken) return needsToken();
    said(told ? "the learner does not answer: what it said last is shown" : "the learner does not answer");
  }
  if (!document.hidden) timer = setTimeout(look, EVERY_MS);
}

listenForLogin("This is neither a tenant's key nor the learner's token.", look);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("main").focus();
}); // its own # would be another view
look();
