// The tables behind the picture. Rows that say the same stay the elements they are.

import { ago, bytes, h, nodeAt, plain, roleOf } from "./text.js";

/** Fills a table's body. Each row: [key, cells], the first cell its head. */
function fill(id, rows, columns, nothing) {
  const body = document.getElementById(id);
  const kept = new Map();
  for (const row of body.rows) if (row.dataset.key) kept.set(row.dataset.key, row);
  const wanted = rows.map(([key, cells]) => {
    const text = JSON.stringify(cells);
    const old = kept.get(key);
    if (old && old.dataset.text === text) return old;
    const row = h("tr", { "data-key": key, "data-text": text });
    cells.forEach((cell, at) => {
      const isNumber = typeof cell === "object" && cell !== null;
      const content = isNumber ? cell.n : cell;
      row.append(at === 0 ? h("th", { scope: "row" }, content) : h("td", { class: isNumber ? "n" : null }, content));
    });
    return row;
  });
  if (wanted.length === 0) wanted.push(h("tr", {}, h("td", { colspan: columns }, nothing || "none")));
  const same = body.rows.length === wanted.length && wanted.every((row, at) => body.rows[at] === row);
  if (!same) body.replaceChildren(...wanted);
}

const n = (text) => ({ n: String(text) });

/** What changes all the time. */
export function fillLive(report, found) {
  const agent = report.agent;
  const drops = Object.entries(report.dropReasons).sort((a, b) => agent.drops[b[0]] - agent.drops[a[0]]);
  fill("drops", drops.map(([reason, help]) => [reason, [reason, n(agent.drops[reason]), help.meaning, help.remedy]]), 4);
  const end = (tunnel) => {
    const node = nodeAt(report, tunnel);
    return (tunnel.name || tunnel.key) + (node ? ` (${node.name})` : "");
  };
  const tunnels = agent.tunnels.map((tunnel) => [
    tunnel.key,
    [end(tunnel), tunnel.endpoint || "–", ago(report, tunnel.lastHandshake), n(bytes(tunnel.receivedBytes)), n(bytes(tunnel.sentBytes))],
  ]);
  fill("tunnels", tunnels, 5, "none: only leaders, gateways and stand-bys have tunnels");
  fillPeers(report, found);
}

function fillPeers(report, found) {
  const tunnels = new Map(report.agent.tunnels.map((tunnel) => [tunnel.key, tunnel]));
  const peers = report.peers.filter((peer) => !found || found.peers.has(peer.name)).map((peer) => {
    const tunnel = peer.key && tunnels.get(peer.key);
    const here = tunnel
      ? [ago(report, tunnel.lastHandshake), n(bytes(tunnel.receivedBytes)), n(bytes(tunnel.sentBytes))]
      : ["–", n("–"), n("–")];
    return [peer.name, [peer.name, peer.valid ? "yes" : "no", peer.allowedIPs.join(", "), peer.endpoint || "–", ...here, peer.reason || ""]];
  });
  fill("peers", peers, 8);
}

/** Everything. */
export function fillTables(report, found) {
  fillLive(report, found);
  const changes = report.leaderChanges.map((change, at) => [
    `${change.time} ${change.location} ${report.leaderChanges.length - at}`,
    [ago(report, change.time), plain(change.location), change.from || "–", change.to || "–", change.why],
  ]);
  fill("history", changes, 5);
  const locations = report.locations.filter((location) => !found || found.shown.has(location.name));
  fill("locations", locations.map((location) => [location.name, [
    plain(location.name),
    location.acting ? `${location.acting} in the place of ${location.leader}` : location.leader || "nobody",
    (location.gateways || []).join(", ") || "–",
    location.since ? ago(report, location.since) : "unknown",
    (report.leaderRules[location.reason] || "no node is ready") + (location.warning ? "; " + location.warning : ""),
    location.endpoint || "–",
    location.wireguardIP || "–",
    n(`${location.ready}/${location.nodes}`),
  ]]), 8);
  const nodes = report.nodes.filter((node) => !found || found.nodes.has(node.name) || found.locations.has(node.location));
  // What is wrong first.
  nodes.sort((a, b) => a.ready - b.ready || b.leads - a.leads);
  fill("nodes", nodes.map((node) => [node.name, [
    node.name,
    plain(node.location),
    roleOf(node),
    node.ready ? "yes" : "no",
    node.internalIP || "–",
    node.podCIDRs.join(", "),
    ago(report, node.lastSeen),
    (node.notReady || []).join(", "),
  ]]), 8);
}
