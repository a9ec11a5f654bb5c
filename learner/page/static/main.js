// Which view is shown: that of the address behind the #. Login where the learner has a token.
import { $, address, ask, besides, el, NeedsToken, place } from "./dom.js";
import { listenForLogin } from "./login.js";
import { RunView } from "./run.js";
import { showSettings } from "./settings.js";
import { Viewer } from "./viewer.js";
import { WhatIf } from "./what_if.js";

const VIEWS = ["run", "trajectories", "settings", "what-if", "login"];
const said = (text) => {
  if ($("state").textContent !== text) $("state").textContent = text;
};
const view = new RunView({ needsToken, said });
const viewer = new Viewer($("view-trajectories"), { needsToken });
const whatIf = new WhatIf($("view-what-if"), { needsToken });
let runs = [];

function only(name) {
  for (const each of VIEWS) $(`view-${each}`).hidden = each !== name;
}

function needsToken() {
  view.hide();
  whatIf.hide();
  said("a token is wanted");
  only("login");
  $("token").focus();
}

const valid = (given) => besides(given).filter((each) => each !== (given.run ?? "0") && runs[Number(each)]);

function route() {
  const { view: wanted, given } = place(),
    name = VIEWS.includes(wanted) && wanted !== "login" ? wanted : "run",
    run = given.run ?? "0";
  const others = valid(given).map((each) => ({ run: each, name: runs[Number(each)].name }));
  only(name);
  for (const each of ["run", "trajectories", "settings", "what-if"]) {
    $(`to-${each}`).href = address(each, { run: run === "0" ? null : run, with: given.with });
    if (each === name) $(`to-${each}`).setAttribute("aria-current", "page");
    else $(`to-${each}`).removeAttribute("aria-current");
  }
  $("runs").value = run;
  $("name").textContent = runs[Number(run)]?.name ?? "";
  const named = runs[Number(run)]?.name ?? "";
  offer(run, others);
  if (name === "run") view.show(run, named, others, given);
  else view.hide();
  if (name === "trajectories") {
    said("");
    viewer.show(given, named, others);
  }
  if (name === "what-if") {
    said("");
    whatIf.show(given);
  } else whatIf.hide();
  if (name === "settings") {
    said("");
    showSettings($("view-settings"), { run, name: named }, others, needsToken);
  }
}

function offer(run, others) { // a button for each run that can be shown beside this one; the address holds which are
  const shown = others.map((other) => other.run), wanted = runs.map((_, i) => String(i)).filter((each) => each !== run);
  const made = [...$("beside").querySelectorAll("button")];
  // buttons outlast a change of view: one that is in the reader's hand keeps its focus
  if (made.map((button) => button.dataset.run).join() !== wanted.join()) {
    $("beside").replaceChildren(...(wanted.length ? ["beside ", ...wanted.map(toggle)] : []));
  }
  for (const button of $("beside").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(shown.includes(button.dataset.run)));
  }
}

function toggle(run) {
  const pressed = () => {
    const { view: name, given } = place(), shown = valid(given);
    location.hash = address(name, {
      ...given,
      with: (shown.includes(run) ? shown.filter((one) => one !== run) : [...shown, run]).join(","),
    });
  };
  return el("button", { type: "button", "data-run": run, onclick: pressed }, runs[Number(run)].name);
}

async function start() {
  try {
    runs = await ask("runs");
  } catch (error) {
    if (error instanceof NeedsToken) return needsToken();
    said("the learner does not answer");
    return setTimeout(start, 2000);
  }
  $("runs").replaceChildren(...runs.map((run, i) => el("option", { value: String(i) }, run.name)));
  $("choose").hidden = $("beside").hidden = runs.length < 2;
  route();
}

listenForLogin("This is not the learner's token.", start);
$("runs").addEventListener("change", () => {
  location.hash = address(place().view, {
    run: $("runs").value,
    with: besides(place().given).filter((each) => each !== $("runs").value).join(","),
  });
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("main").focus();
}); // its own # would be another view
addEventListener("hashchange", route);
start();
