// What is searched for: words that name nodes, locations, peers and addresses.

import { count, plain } from "./text.js";

/** What of a report a query and the filter leave: null where everything is left. */
export function find(report, query, onlyProblems) {
  const words = query.trim().toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0 && !onlyProblems) return null;
  const has = (text) => words.every((word) => text.includes(word));
  const nodes = new Set();
  const locations = new Set();
  const peers = new Set();
  const ill = new Set((report.verdict.problems || []).map((problem) => problem.object));
  for (const location of report.locations) {
    const isIll = !location.leader || location.ready < location.nodes || !!location.warning
      || ill.has("location/" + location.name);
    const text = [plain(location.name), location.endpoint, location.wireguardIP].join(" ").toLowerCase();
    if (words.length > 0 && has(text) && (!onlyProblems || isIll)) locations.add(location.name);
    if (words.length === 0 && isIll) locations.add(location.name);
  }
  for (const node of report.nodes) {
    const isIll = !node.ready || ill.has("node/" + node.name);
    const text = [node.name, plain(node.location), node.internalIP, node.endpoint, node.podCIDRs.join(" "), node.key]
      .join(" ").toLowerCase();
    if (has(text) && (!onlyProblems || isIll)) nodes.add(node.name);
  }
  for (const peer of report.peers) {
    const text = [peer.name, peer.allowedIPs.join(" "), peer.endpoint, peer.key].join(" ").toLowerCase();
    if (has(text) && (!onlyProblems || !peer.valid)) peers.add(peer.name);
  }
  const shown = new Set(locations);
  for (const node of report.nodes) if (nodes.has(node.name)) shown.add(node.location);
  const parts = [[nodes.size, "node"], [locations.size, "location"], [peers.size, "peer"]];
  const text = parts.filter(([size]) => size > 0).map(([size, word]) => count(size, word)).join(", ");
  return { nodes, locations, shown, peers, text: text || "nothing found" };
}
