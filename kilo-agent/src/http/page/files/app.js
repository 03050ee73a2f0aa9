// The page: keeps what the server wrote current, and adds the map, the cards and the search.

import { fillCards } from "./cards.js";
import { follow } from "./live.js";
import { mapIn } from "./map.js";
import { find } from "./search.js";
import { fillLive, fillTables } from "./tables.js";
import { h } from "./text.js";

/** Problems that are shown before somebody asks for all. */
const FIRST = 5;

const $ = (id) => document.getElementById(id);
const map = mapIn($("map"), $("tip"));
let report = null;
/** Why the report is old: null, or { kind, text }. */
let lost = null;
let showAll = false;

for (const id of ["tools", "map-section", "cards-section"]) $(id).hidden = false;

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** What stands in the place of the verdict when the report is old. */
function lostText(node) {
  if (lost.kind === "gone") return `The agent of ${node} does not answer.`;
  if (lost.kind === "error") return `The agent of ${node} answers, but not with its status: ${lost.text}.`;
  return `Signed out: the agent of ${node} does not accept this page's token any more.`;
}

/** Word beside the name, and at the beginning of the title. */
const LOST = { gone: ["no answer", "No answer"], error: ["not current", "Not current"], refused: ["signed out", "Signed out"] };

function showLive() {
  $("live").className = "live " + (lost ? "lost" : "on");
  set($("live"), lost ? LOST[lost.kind][0] : "live");
  $("sign-in").hidden = !lost || lost.kind !== "refused";
}

function showVerdict() {
  const { healthy, text, problems } = report.verdict;
  const node = report.agent.node;
  $("verdict").className = "verdict " + (lost ? "bad" : healthy ? "good" : "bad");
  set($("verdict-text"), lost ? `${lostText(node)} What is shown is as of ${clock(report.time)}: ${text}` : text);
  const shown = showAll ? problems : problems.slice(0, FIRST);
  const list = $("problems");
  const key = JSON.stringify(shown);
  if (list.dataset.text !== key) {
    list.dataset.text = key;
    list.replaceChildren(...shown.map((problem) => h("li", {}, h("b", {}, problem.object), " ", problem.what)));
  }
  const more = $("more-problems");
  more.hidden = problems.length <= FIRST;
  more.textContent = showAll ? "Show the first only" : `Show all ${problems.length} problems`;
  more.setAttribute("aria-expanded", String(showAll));
  const word = lost ? LOST[lost.kind][1] : healthy ? "Healthy" : problems.length === 1 ? "1 problem" : `${problems.length} problems`;
  document.title = `${healthy && !lost ? "✔" : "✖"} ${word} – ${node} – Kilo`;
  set($("who"), `as ${node} sees it, kg ${report.agent.version}`);
  showLive();
  $("live").title = `as of ${report.time}`;
}

const clock = (time) => new Date(time).toLocaleTimeString();

function search() {
  const found = report && find(report, $("search").value, $("only-problems").checked);
  set($("found"), found ? found.text : "");
  return found;
}

function showAgent() {
  const { agent } = report;
  const entries = [
    ...(agent.warnings || []).map((text) => ["warning", text]),
    ...(agent.errors || []).map((text) => ["error", text]),
    ...Object.entries(report.problems).map(([object, text]) => ["ignored", `${object}: ${text}`]),
  ];
  if (agent.failover) {
    const { role, term, lastChange } = agent.failover;
    entries.push(["failover", `${role} since term ${term}${lastChange ? "; " + lastChange : ""}`]);
  }
  for (const at of agent.programs) entries.push([at.program, `on ${at.interface}, ${at.direction}, ${at.hook}`]);
  const key = JSON.stringify(entries);
  if ($("agent").dataset.text === key) return;
  $("agent").dataset.text = key;
  $("agent").replaceChildren(...entries.map(([name, text]) => h("li", {}, h("b", {}, name), " ", text)));
}

function showAllOf() {
  const found = search();
  showVerdict();
  fillCards(report, found);
  map.show(report, found);
  fillTables(report, found);
  showAgent();
}

follow({
  whole(next) {
    report = next;
    showAllOf();
  },
  now(part) {
    if (!report) return;
    report = { ...report, ...part };
    const found = search();
    showVerdict();
    fillCards(report, found);
    map.show(report, found);
    fillLive(report, found);
  },
  lost(why) {
    if (JSON.stringify(why) === JSON.stringify(lost)) return;
    lost = why;
    if (report) showVerdict();
    else showLive();
  },
});

$("search").addEventListener("input", () => report && showAllOf());
$("only-problems").addEventListener("change", () => report && showAllOf());
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") map.goToFound();
  if (event.key === "Escape" && $("search").value) {
    $("search").value = "";
    if (report) showAllOf();
  }
});
document.addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof HTMLInputElement;
  if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  $("search").focus();
});
$("more-problems").addEventListener("click", () => {
  showAll = !showAll;
  showVerdict();
});
$("zoom-in").addEventListener("click", () => map.zoom(1.4));
$("zoom-out").addEventListener("click", () => map.zoom(1 / 1.4));
$("zoom-fit").addEventListener("click", () => map.fit());
$("expand").addEventListener("click", () => map.setAll(true));
$("collapse").addEventListener("click", () => map.setAll(false));
