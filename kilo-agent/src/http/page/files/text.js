// Words, times and sizes; making elements. Text of others becomes text nodes only, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text, null and false nothing. */
export function h(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same in SVG. */
export function s(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** A location without its kind: location:east is east. */
export function plain(name) {
  const at = name.indexOf(":");
  return at < 0 ? name : name.slice(at + 1) || "(no name)";
}

/** Seconds as kubectl writes them, two units at most. */
export function duration(seconds) {
  const left = Math.max(0, Math.floor(seconds));
  const parts = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];
  let rest = left;
  const words = [];
  for (const [unit, letter] of parts) {
    const count = Math.floor(rest / unit);
    rest -= count * unit;
    if (count > 0) words.push(count + letter);
    if (words.length === 2) break;
  }
  return words.join("") || "0s";
}

/** How long before the report a time was, in seconds; null: never. */
export function age(report, time) {
  return time ? (Date.parse(report.time) - Date.parse(time)) / 1000 : null;
}

export function ago(report, time) {
  const seconds = age(report, time);
  return seconds === null ? "never" : duration(seconds) + " ago";
}

export function bytes(count) {
  let value = count;
  let unit = "B";
  for (const next of ["KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return unit === "B" ? `${count} B` : `${value.toFixed(1)} ${unit}`;
}

export function count(number, one, many) {
  return `${number} ${number === 1 ? one : many || one + "s"}`;
}

/** After this many seconds WireGuard no longer uses a handshake's keys. */
const VALID = 180;

const owners = new WeakMap();

/** The node whose key a tunnel's other end has; undefined for VPN peers. */
export function nodeAt(report, tunnel) {
  if (!owners.has(report.nodes)) owners.set(report.nodes, new Map(report.nodes.map((node) => [node.key, node])));
  return owners.get(report.nodes).get(tunnel.key);
}

/** What a tunnel's handshake says: up, idle or silent. */
export function tunnelState(report, tunnel) {
  const degraded = (report.agent && report.agent.degraded) || [];
  const node = nodeAt(report, tunnel);
  const names = node ? [`${tunnel.name} (${node.name} `, `${tunnel.name} (${node.name})`] : [tunnel.name + " "];
  if (tunnel.name && degraded.some((what) => names.some((name) => what.startsWith(name)))) return "silent";
  const seconds = age(report, tunnel.lastHandshake);
  return seconds !== null && seconds <= VALID ? "up" : "idle";
}

/** Of several tunnels to one location: silent when one is, up when one is. */
export function stateOfAll(states) {
  return ["silent", "up"].find((state) => states.includes(state)) || "idle";
}

/** leader, gateway, "by" the gateway that a node uses, or nothing: as kgctl status has it. */
export function roleOf(node) {
  if (node.leads || !node.gateway) return node.leads ? "leader" : "";
  return node.gateway === node.name ? "gateway" : `by ${node.gateway}`;
}

/** The gateways of a location, each with how many nodes use it, itself among them; none where one node leads alone. */
export function gatewaysOf(location, nodes) {
  return (location.gateways || []).map((name) => [name, nodes.filter((node) => node.gateway === name).length]);
}

/** Where the agent of another node shows its page, when this one was asked at its address. */
export function pageOf(node) {
  const byAddress = /^[0-9.]+$|^\[[0-9a-f:]+\]$/i.test(location.hostname) && location.pathname === "/";
  if (!node || !node.internalIP || !byAddress) return null;
  const host = node.internalIP.includes(":") ? `[${node.internalIP}]` : node.internalIP;
  return `http://${host}:${location.port || 80}/`;
}
