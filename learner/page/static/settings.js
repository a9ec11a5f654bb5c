// The configuration of a run, what differs from the defaults first.
import { NeedsToken, ask, el, table } from "./dom.js";

export async function showSettings(target, run, needsToken) {
  let made;
  try { made = await ask("made_with", { run }); } catch (error) {
    if (error instanceof NeedsToken) return needsToken();
    return target.replaceChildren(el("p", {}, String(error.message)));
  }
  const settings = Object.entries(made.settings ?? {}), differs = new Set(made.differs ?? []);
  const text = value => (typeof value === "string" ? value : JSON.stringify(value));
  const sorted = [...settings.filter(([key]) => differs.has(key)), ...settings.filter(([key]) => !differs.has(key))];
  const search = el("input", { type: "search", class: "text", id: "settings-search", oninput: () => fill() });
  const only = el("input", { type: "checkbox", id: "settings-differs", checked: differs.size > 0, onchange: () => fill() });
  const grid = el("table"), count = el("p", { class: "soft", role: "status" });
  const fill = () => {
    const found = sorted.filter(([key]) => key.includes(search.value.trim()) && (!only.checked || differs.has(key)));
    table(grid, ["setting", "value"], found.map(([key, value]) => [key, text(value)]), found.map(([key]) => (differs.has(key) ? "differs" : "")));
    count.textContent = `${found.length} of ${settings.length} settings of the learner; ${differs.size} differ from their defaults`;
  };
  const facts = [["began", made.began], ["command", made.command?.join(" ")], ["host", made.host && `${made.host.name}, ${made.host.cores} cores, ${made.host.system}`],
    ["commit", made.git && `${made.git.commit}${made.git.changed_files ? `, ${made.git.changed_files} files changed` : ""}`],
    ["versions", made.versions && Object.entries(made.versions).map(pair => pair.join(" ")).join(", ")], ["changes at the last resume", made.changes?.join("; ")], ["former starts", made.former_starts?.length || null]];
  const about = el("table");
  table(about, ["made with", "what"], facts.filter(([, value]) => value).map(([name, value]) => [name, String(value)]));
  target.replaceChildren(el("h2", {}, "Settings"), el("div", { class: "row" }, el("label", { for: "settings-search" }, "Search", search), el("label", { for: "settings-differs" }, "Only what differs", only)),
    count, el("div", { class: "wide" }, grid), el("h2", {}, "Made with"), el("div", { class: "wide" }, about));
  fill();
}
