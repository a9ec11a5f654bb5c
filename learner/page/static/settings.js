// The configuration of a run, what differs from the defaults first; beside it that of other runs, what differs between
// them.
import { ask, el, NeedsToken, table } from "./dom.js";

let turn = 0;

export async function showSettings(target, { run, name }, others, needsToken) {
  const mine = ++turn;
  let made, beside;
  try {
    [made, ...beside] = await Promise.all([{ run }, ...others].map((each) => ask("made_with", { run: each.run })));
  } catch (error) {
    if (error instanceof NeedsToken) return needsToken();
    return mine === turn ? target.replaceChildren(el("p", {}, String(error.message))) : undefined;
  }
  if (mine !== turn) return undefined; // another run is wanted meanwhile
  const all = [made, ...beside].map((one) => one.settings ?? {}),
    text = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  const settings = [...new Set(all.flatMap((one) => Object.keys(one)))].map(
    (key) => [key, ...all.map((one) => text(one[key]))],
  );
  const differs = others.length
    ? new Set(settings.filter(([, first, ...rest]) => rest.some((value) => value !== first)).map(([key]) => key))
    : new Set(made.differs ?? []);
  const sorted = [...settings.filter(([key]) => differs.has(key)), ...settings.filter(([key]) => !differs.has(key))];
  const search = el("input", { type: "search", class: "text", id: "settings-search", oninput: () => fill() });
  const only = el("input", {
    type: "checkbox",
    id: "settings-differs",
    checked: differs.size > 0,
    onchange: () => fill(),
  });
  const grid = el("table"), count = el("p", { class: "soft", role: "status" });
  const fill = () => {
    const found = sorted.filter(([key]) => key.includes(search.value.trim()) && (!only.checked || differs.has(key)));
    table(
      grid,
      ["setting", ...(others.length ? [name, ...others.map((other) => other.name)] : ["value"])],
      found,
      found.map(([key]) => (differs.has(key) ? "differs" : "")),
    );
    count.textContent = `${found.length} of ${settings.length} settings of the learner; ${differs.size} differ ${
      others.length ? "between the runs" : "from their defaults"
    }`;
  };
  const facts = [
    ["began", made.began],
    ["command", made.command?.join(" ")],
    ["host", made.host && `${made.host.name}, ${made.host.cores} cores, ${made.host.system}`],
    [
      "commit",
      made.git && `${made.git.commit}${made.git.changed_files ? `, ${made.git.changed_files} files changed` : ""}`,
    ],
    ["versions", made.versions && Object.entries(made.versions).map((pair) => pair.join(" ")).join(", ")],
    ["changes at the last resume", made.changes?.join("; ")],
    ["former starts", made.former_starts?.length || null],
  ];
  const about = el("table");
  table(about, ["made with", "what"], facts.filter(([, value]) => value).map(([name, value]) => [name, String(value)]));
  target.replaceChildren(
    el("h2", {}, "Settings"),
    el(
      "div",
      { class: "row" },
      el("label", { for: "settings-search" }, "Search", search),
      el("label", { for: "settings-differs" }, "Only what differs", only),
    ),
    count,
    el("div", { class: "wide" }, grid),
    el("h2", {}, "Made with"),
    el("div", { class: "wide" }, about),
  );
  return fill();
}
