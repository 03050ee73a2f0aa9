// Locations as cards, what is wrong first.

import { ago, bytes, count, gatewaysOf, h, nodeAt, pageOf, plain, roleOf, tunnelState } from "./text.js";

/** With more locations than this, cards of those that are well are short until opened. */
const LONG_CARDS = 12;
/** Nodes named on a card that are not in the mesh. */
const MOST_OUT = 6;

const STATES = {
  up: "answers",
  idle: "no handshake in the last 3 minutes: no traffic, or no answer",
  silent: "does not answer",
};

/** good, warn or bad. */
export function stateOf(report, location, problems) {
  if (!location.leader || problems.has("location/" + location.name)) return "bad";
  const tunnels = report.agent.tunnels.filter((tunnel) => tunnel.name === location.name);
  const silent = tunnels.filter((tunnel) => tunnelState(report, tunnel) === "silent").length;
  if (silent > 0 && silent === tunnels.length) return "bad";
  if (location.ready < location.nodes || location.warning || location.acting || silent > 0) return "warn";
  return "good";
}

/** Shows the locations; cards that say the same stay. */
export function fillCards(report, found) {
  const place = document.getElementById("cards");
  const kept = new Map([...place.children].map((card) => [card.dataset.key, card]));
  const problems = new Set(report.verdict.problems.map((problem) => problem.object));
  const members = new Map();
  for (const node of report.nodes) {
    if (!members.has(node.location)) members.set(node.location, []);
    members.get(node.location).push(node);
  }
  const order = { bad: 0, warn: 1, good: 2 };
  const own = report.nodes.find((node) => node.name === report.agent.node);
  const shown = report.locations
    .filter((location) => !found || found.shown.has(location.name))
    .map((location) => ({ location, state: stateOf(report, location, problems) }));
  const isOwn = ({ location }) => own && own.location === location.name;
  shown.sort((a, b) => order[a.state] - order[b.state] || isOwn(b) - isOwn(a));
  const isLong = shown.length <= LONG_CARDS;
  const cards = shown.map((entry) => {
    const nodes = members.get(entry.location.name) || [];
    const facts = describe(report, entry.location, nodes, isOwn(entry));
    const text = JSON.stringify([facts, entry.state, isLong]);
    const old = kept.get(entry.location.name);
    if (old && old.dataset.text === text) return old;
    const open = old && old.querySelector("details") ? old.querySelector("details").open : false;
    return draw(entry, facts, nodes, report, isLong || entry.state !== "good", open, text);
  });
  if (cards.length === 0) cards.push(h("p", {}, found ? "No location fits." : "No node has a key yet: no location."));
  const same = place.children.length === cards.length && cards.every((card, at) => place.children[at] === card);
  if (!same) replaceKeepingFocus(place, cards);
}

/** Elements that stay are moved, and the one with the focus keeps it. */
function replaceKeepingFocus(place, cards) {
  const focused = document.activeElement;
  place.replaceChildren(...cards);
  if (focused && focused !== document.activeElement && place.contains(focused)) focused.focus({ preventScroll: true });
}

/** What a card says, as plain values. */
function describe(report, location, nodes, isOwn) {
  const failover = isOwn ? report.agent.failover : null;
  const tunnels = report.agent.tunnels.filter((tunnel) => tunnel.name === location.name);
  return {
    title: plain(location.name),
    kind: location.name.startsWith("node:") ? "node on its own" : "location",
    isOwn,
    ready: [location.ready, location.nodes],
    leader: location.leader,
    acting: location.acting || (failover && failover.leader !== failover.kilosLeader && failover.leader) || null,
    rule: report.leaderRules[location.reason] || null,
    since: location.since ? (location.changes === 0 ? "at least " : "") + ago(report, location.since).replace(" ago", "") : null,
    changes: location.changes || 0,
    gateways: gatewaysOf(location, nodes),
    endpoint: location.endpoint,
    address: location.wireguardIP,
    warning: location.warning || null,
    failover: failover && {
      role: failover.role,
      standBys: failover.standBys.map((it) => [it.node, it.fit === undefined ? "" : it.fit ? "fit" : "not fit", it.roundTrip]),
      lastChange: failover.lastChange || null,
    },
    tunnels: tunnels.map((tunnel) => [
      tunnelState(report, tunnel),
      ago(report, tunnel.lastHandshake),
      bytes(tunnel.receivedBytes),
      bytes(tunnel.sentBytes),
      tunnel.endpoint || null,
      tunnels.length > 1 && nodeAt(report, tunnel) ? nodeAt(report, tunnel).name : null,
    ]),
    out: nodes.filter((node) => !node.ready).map((node) => [node.name, (node.notReady || []).join(", ")]),
    nodes: nodes.map((node) => [node.name, node.ready, roleOf(node)]),
  };
}

function draw({ location, state }, facts, nodes, report, isLong, open, text) {
  const [ready, all] = facts.ready;
  const badge = h("span", { class: "badge " + state }, `${ready}/${all} ready`);
  const card = h("article", { class: "card " + state, "data-key": location.name, "data-text": text, "aria-label": `${facts.kind} ${facts.title}` },
    h("h3", {}, facts.title, " ", facts.isOwn && h("small", {}, "here "), badge),
    leader(facts, report), gateways(facts, report));
  if (facts.warning) card.append(h("p", { class: "warning" }, facts.warning));
  if (facts.out.length > 0) card.append(outOf(facts.out));
  const details = h("details", { open },
    h("summary", {}, count(all, "node"), isLong ? "" : ", endpoint, tunnel"),
    h("ul", { class: "chips" }, nodes.map((node) => chip(node, facts))));
  const more = [endpoints(facts), ...facts.tunnels.map(tunnel), failover(facts)].filter(Boolean);
  if (isLong) card.append(...more);
  else details.append(...more);
  card.append(details);
  return card;
}

function leader(facts, report) {
  if (!facts.leader) return h("p", { class: "leader" }, h("b", {}, "Nobody leads"), ": no node is ready, nothing reaches it");
  const since = facts.since ? ` for ${facts.since}` : "";
  const changes = facts.changes > 0 ? `, ${count(facts.changes, "change")} seen` : "";
  const node = report.nodes.find((node) => node.name === (facts.acting || facts.leader));
  const name = (text) => linked(text, node, report);
  if (facts.acting && facts.acting !== facts.leader) {
    return h("p", { class: "leader" }, name(facts.acting), " acts as leader", h("br"),
      h("small", {}, "in the place of ", facts.leader, since, changes));
  }
  return h("p", { class: "leader" }, "Leader ", name(facts.leader), h("br"), h("small", {}, facts.rule || "", since && "," + since, changes));
}

/** A node's name, which leads to its page where that can be. */
function linked(text, node, report) {
  const url = node && node.name !== report.agent.node ? pageOf(node) : null;
  return url ? h("a", { href: url, rel: "noreferrer", title: "its page" }, text) : h("b", {}, text);
}

function gateways(facts, report) {
  if (facts.gateways.length === 0) return null;
  const item = ([name, nodes]) => h("li", {}, linked(name, report.nodes.find((node) => node.name === name), report), ` for ${count(nodes, "node")}`);
  return h("div", { class: "gateways" }, h("p", {}, `${facts.gateways.length} gateways share its nodes:`), h("ul", {}, facts.gateways.map(item)));
}

function outOf(out) {
  const named = out.slice(0, MOST_OUT).map(([name, why]) => h("li", {}, h("b", {}, name), " ", why || "not ready"));
  if (out.length > MOST_OUT) named.push(h("li", {}, `and ${out.length - MOST_OUT} more`));
  return h("div", { class: "outs" }, h("p", {}, "Not in the mesh:"), h("ul", {}, named));
}

function endpoints(facts) {
  if (!facts.leader) return null;
  return h("dl", {}, h("dt", {}, "Endpoint"), h("dd", {}, facts.endpoint || "–"), h("dt", {}, "WireGuard"), h("dd", {}, facts.address || "–"));
}

function tunnel([state, handshake, received, sent, endpoint, node]) {
  return h("p", { class: "tunnel " + state, title: STATES[state] },
    h("b", {}, node ? `Tunnel to ${node} ` : "Tunnel from here "), h("span", {}, state === "up" ? "" : STATES[state] + "; "),
    `handshake ${handshake}`, h("br"), `↓ ${received}  ↑ ${sent}`, endpoint && h("small", {}, " at ", endpoint));
}

function failover(facts) {
  if (!facts.failover) return null;
  const { role, standBys, lastChange } = facts.failover;
  const names = standBys.map(([node, fit, roundTrip]) => [node, fit, roundTrip === undefined ? "" : `RTT ${roundTrip} ms`].filter(Boolean).join(" "));
  return h("dl", {}, h("dt", {}, "Failover"), h("dd", {}, `this node: ${role || "starting"}`),
    h("dt", {}, "Stand-bys"), h("dd", {}, names.join(", ") || "none"),
    lastChange && h("dt", {}, "Last"), lastChange && h("dd", {}, lastChange));
}

function chip(node, facts) {
  const by = roleOf(node);
  const role = node.name === facts.acting ? "acting" : node.leads ? "leader" : !node.ready ? "out" : by === "gateway" ? "gateway" : "member";
  const word = { acting: " acts as leader", leader: " leads", gateway: " gateway", member: by && " " + by, out: " not in the mesh" }[role];
  return h("li", { class: "chip " + role, title: node.internalIP || null }, node.name, h("span", { class: "quiet" }, word));
}
