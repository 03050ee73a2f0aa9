// The map: locations as boxes, nodes in them as dots, or with their names when a box is open.

import { arrange, box, LONGEST, nearest } from "./layout.js";
import { stateOf } from "./cards.js";
import { ago, bytes, count, gatewaysOf, h, nodeAt, plain, roleOf, s, stateOfAll, tunnelState } from "./text.js";
import { viewOf } from "./view.js";

/** With no more nodes than this all boxes are open at first. */
const OPEN_AT_FIRST = 80;
/** Lines between all leaders are drawn up to this many locations; else those of this node. */
const ALL_LINES = 8;

const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
/** Without its middle: nodes differ at the end of their names. */
const tight = (text) => (text.length > LONGEST ? text.slice(0, 11) + "…" + text.slice(12 - LONGEST) : text);

/** A map in `place`, with tooltips in `tip`. */
export function mapIn(place, tip) {
  const svg = s("svg", { role: "group", "aria-label": "Map of the mesh", "aria-describedby": "map-hint" });
  place.append(svg);
  let size = { width: 600, height: 400 };
  let report = null;
  let found = null;
  let drawn = "";
  let begun = false;
  /** Things with a place: key, x, y, width, height, element, about(). */
  let things = [];
  /** Tunnels from here with their states, by the name of the other end. */
  let tunnels = new Map();
  const opened = new Map();
  let everything = null;
  const hide = () => { tip.hidden = true; };
  const view = viewOf(svg, () => size, hide);

  const isOpen = (location, total) =>
    opened.get(location.name) ?? everything ?? (total <= OPEN_AT_FIRST || (location.nodes === 1 && total <= 200));

  function draw() {
    tunnels = new Map();
    for (const tunnel of report.agent.tunnels.filter((tunnel) => tunnel.name)) {
      if (!tunnels.has(tunnel.name)) tunnels.set(tunnel.name, []);
      tunnels.get(tunnel.name).push({ tunnel, state: tunnelState(report, tunnel) });
    }
    const members = new Map();
    for (const node of report.nodes) {
      if (!members.has(node.location)) members.set(node.location, []);
      members.get(node.location).push(node);
    }
    const problems = new Set(report.verdict.problems.map((problem) => problem.object));
    const boxes = report.locations.map((location) => {
      const nodes = [...(members.get(location.name) || [])].sort(inOrder);
      const hit = found && nodes.some((node) => found.nodes.has(node.name)) && found.nodes.size <= 60;
      const open = isOpen(location, report.nodes.length) || !!(hit && opened.get(location.name) !== false);
      const state = stateOf(report, location, problems);
      return { location, nodes, open, state, ...box(nodes.map((node) => node.name), open, plain(location.name).length) };
    });
    const all = [...boxes];
    const peers = report.peers.filter((peer) => peer.valid);
    if (peers.length > 0) {
      const open = opened.get("peers") ?? everything ?? peers.length <= 30;
      all.push({ peers, open, state: "peers", ...box(peers.map((peer) => peer.name), open, 9) });
    }
    const shape = JSON.stringify([
      all.map((it) => [it.location, it.peers, it.open, it.state, it.nodes && it.nodes.map((node) => [node.name, node.ready, roleOf(node)])]),
      found && [[...found.nodes], [...found.shown], [...found.peers]],
      [...tunnels.values()].flat().map((it) => [it.tunnel.key, it.state]), svg.clientWidth,
    ], (key, value) => (key === "since" ? undefined : value));
    if (shape === drawn) return;
    drawn = shape;
    const focused = things.find((thing) => thing.element === document.activeElement);
    things = [];
    if (all.length === 0) {
      svg.replaceChildren(s("text", { x: 20, y: 40, class: "title" }, "There is no location yet."));
      return;
    }
    // As high as it needs, and no higher than leaves room for the rest.
    const [width, most] = [svg.clientWidth || 600, Math.max(360, Math.min(window.innerHeight * 0.64, 640))];
    size = arrange(all, width / most);
    svg.style.height = `${Math.round(Math.max(220, Math.min(most, size.height * Math.max(0.62, Math.min(1, width / size.width)))))}px`;
    const lines = s("g", { class: "lines" }, linesOf(boxes));
    const places = all.map(drawBox);
    svg.replaceChildren(lines, ...places);
    if (begun) view.show();
    else view.begin(all.find((it) => it.state === "bad") || boxes.find(isOwn) || all[0]);
    begun = true;
    const again = (focused && things.find((thing) => thing.key === focused.key)) || null;
    (again || things[0]).element.setAttribute("tabindex", "0");
    if (again) again.element.focus({ preventScroll: true });
  }

  const own = () => report.nodes.find((node) => node.name === report.agent.node);
  const isOwn = (it) => !!it.location && own() && own().location === it.location.name;
  const tunnelsTo = (location) => tunnels.get(location.name) || [];
  const stateTo = (location) => stateOfAll(tunnelsTo(location).map((it) => it.state));
  /** Who leads, then gateways, then who is not in the mesh; nodes of one gateway stand together. */
  const rank = (node) => (node.leads ? 0 : node.ready && node.gateway === node.name ? 1 : node.ready ? 3 : 2);
  const inOrder = (a, b) => rank(a) - rank(b) || (a.gateway || "").localeCompare(b.gateway || "");

  function linesOf(boxes) {
    const lines = [];
    const middle = (it) => ({ x: it.x + it.width / 2, y: it.y + it.height / 2 });
    const path = (a, b, attributes) => {
      const [from, to] = [middle(a), middle(b)];
      // A slight bow keeps lines of one row apart.
      const bend = boxes.length > ALL_LINES ? 0.12 : 0;
      const [x, y] = [(from.x + to.x) / 2 - (to.y - from.y) * bend, (from.y + to.y) / 2 + (to.x - from.x) * bend];
      return s("path", { d: `M${from.x} ${from.y}Q${x} ${y} ${to.x} ${to.y}`, ...attributes });
    };
    const led = boxes.filter((it) => it.location.leader);
    if (led.length <= ALL_LINES) {
      led.forEach((a, at) => led.slice(at + 1).forEach((b) => lines.push(path(a, b, { class: "other" }))));
    }
    const here = boxes.find(isOwn);
    for (const there of boxes) {
      if (!here || here === there || tunnelsTo(there.location).length === 0) continue;
      const [{ name }, state] = [there.location, stateTo(there.location)];
      // A fan of good lines hides the bad ones: those are drawn when their location is pointed at.
      const many = led.length > ALL_LINES && state === "up" ? " many" : "";
      const dim = found && !found.shown.has(name) ? " dim" : "";
      lines.push(path(here, there, { class: `tunnel ${state}${many}${dim}`, "data-to": name }));
    }
    return lines;
  }

  function drawBox(it) {
    const fits = !found || (it.location ? found.shown.has(it.location.name) : it.peers.some((peer) => found.peers.has(peer.name)));
    const group = s("g", { class: `box ${it.state}${fits ? "" : " dim"}${isOwn(it) ? " own" : ""}` });
    const title = it.peers ? "VPN peers" : plain(it.location.name);
    const letters = Math.floor((it.width - 52) / 7.6);
    const key = it.peers ? "peers" : "location " + it.location.name;
    // Texts stand beside what has the focus: its name is the whole, not what fits.
    const head = s("g", { class: "head", role: "button", tabindex: "-1", "aria-expanded": String(it.open), "aria-label": aboutBox(it).join(", ") },
      s("rect", { x: it.x, y: it.y, width: it.width, height: it.height, rx: 8 }));
    group.append(head,
      label(it.x + 10, it.y + 18, short(title, letters), "title"),
      label(it.x + it.width - 18, it.y + 19, it.open ? "−" : "+", "sign"),
      label(it.x + 10, it.y + 33, short(below(it), Math.floor((it.width - 20) / 6)), "sub"));
    if (it.location && tunnelsTo(it.location).length > 0) group.append(s("circle", { class: "ping " + stateTo(it.location), cx: it.x + it.width - 29, cy: it.y + 14, r: 4.5 }));
    add({ key, location: it.location && it.location.name, x: it.x, y: it.y, width: it.width, height: 34, element: head, about: () => aboutBox(it), toggle: () => toggle(it) });
    const children = it.peers || it.nodes;
    children.forEach((child, at) => {
      const place = { x: it.x + it.places[at].x, y: it.y + it.places[at].y };
      group.append(it.peers ? drawPeer(child, place, it) : drawNode(child, place, it));
    });
    return group;
  }

  function add(thing) {
    things.push(thing);
    const { element } = thing;
    element.addEventListener("focus", () => {
      for (const other of things) other.element.setAttribute("tabindex", "-1");
      element.setAttribute("tabindex", "0");
      view.reveal(thing, false);
      if (element.matches(":focus-visible")) say(thing);
    });
    element.addEventListener("blur", hide);
    element.addEventListener("pointerenter", () => say(thing));
    element.addEventListener("pointerleave", hide);
    for (const [event, is] of [["focus", true], ["pointerenter", true], ["blur", false], ["pointerleave", false]]) {
      element.addEventListener(event, () => point(thing, is));
    }
    element.addEventListener("click", () => {
      if (view.wasDragged()) return;
      element.focus({ preventScroll: true });
      if (thing.toggle) thing.toggle();
      else say(thing);
    });
  }

  /** Shows the tunnel to what is pointed at. */
  function point(thing, is) {
    for (const line of svg.querySelectorAll(".lines .many")) {
      if (line.dataset.to === thing.location) line.classList.toggle("now", is);
    }
  }

  function drawNode(node, { x, y }, it) {
    const acting = it.location.acting;
    const role = node.name === acting ? "acting" : !node.ready ? "out" : node.leads ? "leader" : roleOf(node) === "gateway" ? "gateway" : "member";
    const dim = found && !found.nodes.has(node.name) && !found.locations.has(node.location);
    const about = () => aboutNode(node, role);
    const { width, height } = it.unit;
    const hit = found && found.nodes.has(node.name);
    const element = thing(about, { x, y, width, height }, it.open ? 5 : 3);
    add({ key: "node " + node.name, location: node.location, x, y, width, height, element, about, hit });
    const end = x + width - 17;
    return s("g", { class: `node ${role}${dim ? " dim" : ""}${hit ? " hit" : ""}` }, element,
      it.open && label(x + 8, y + 16, tight(node.name)),
      it.open && role === "out" && label(end, y + 16, "✕", "cross"),
      !it.open && role === "out" && s("path", { d: `M${x + 3} ${y + 3}l6 6m0-6l-6 6`, class: "cross" }),
      it.open && role === "gateway" && label(end, y + 16, "◆", "star"),
      it.open && role === "leader" && label(end, y + 17, "★", "star"),
      it.open && role === "acting" && label(end, y + 17, "☆", "star"));
  }

  function drawPeer(peer, { x, y }, { open, unit: { width, height } }) {
    const dim = found && !found.peers.has(peer.name);
    const hit = found && found.peers.has(peer.name);
    const about = () => aboutPeer(peer);
    const element = thing(about, { x, y, width, height }, open ? 12 : 6);
    add({ key: "peer " + peer.name, x, y, width, height, element, about, hit });
    return s("g", { class: `node peer${dim ? " dim" : ""}` }, element, open && label(x + 10, y + 16, tight(peer.name)));
  }

  const thing = (about, place, rx) =>
    s("g", { role: "button", tabindex: "-1", "aria-label": about().join(", ") }, s("rect", { ...place, rx }));
  const label = (x, y, text, name) => s("text", { x, y, class: name || null, "aria-hidden": "true" }, text);

  const below = (it) => (it.peers ? count(it.peers.length, "peer")
    : `${it.location.ready}/${it.location.nodes} ready · ${it.location.acting || it.location.leader || "nobody leads"}`);

  function aboutBox(it) {
    if (it.peers) return ["VPN peers", count(it.peers.length, "peer")];
    const { location } = it;
    const lines = [`location ${plain(location.name)}`, `${location.ready} of ${location.nodes} nodes ready`];
    if (!location.leader) lines.push("nobody leads it: nothing reaches it");
    else if (location.acting) lines.push(`${location.acting} acts as leader in the place of ${location.leader}`);
    else lines.push(`leader ${location.leader}: ${report.leaderRules[location.reason] || ""}`);
    const shares = gatewaysOf(location, it.nodes).map(([name, nodes]) => `${name} for ${count(nodes, "node")}`);
    if (shares.length > 0) lines.push(`${shares.length} gateways: ${shares.join(", ")}`);
    if (location.endpoint) lines.push(`endpoint ${location.endpoint}`);
    const all = tunnelsTo(location);
    for (const { tunnel, state } of all) {
      const node = all.length > 1 && nodeAt(report, tunnel);
      const to = node ? `tunnel to ${node.name}` : "tunnel";
      const words = { up: `${to} up`, idle: `${to} without a recent handshake`, silent: `${to} does not answer` }[state];
      lines.push(`${words}: handshake ${ago(report, tunnel.lastHandshake)}, ↓ ${bytes(tunnel.receivedBytes)} ↑ ${bytes(tunnel.sentBytes)}`);
    }
    if (isOwn(it)) lines.push("this node's location");
    if (location.warning) lines.push(location.warning);
    return lines;
  }

  function aboutNode(node, role) {
    const words = { acting: "acts as leader", leader: "leads", gateway: "gateway: one of its location's active leaders", member: "ready", out: "not in the mesh: " + ((node.notReady || []).join(", ") || "not ready") }[role];
    const by = node.gateway && node.gateway !== node.name && `uses gateway ${node.gateway}`;
    return [node.name, words, by, node.internalIP && `address ${node.internalIP}`, node.podCIDRs.length > 0 && `pods ${node.podCIDRs.join(", ")}`,
      `checked in ${ago(report, node.lastSeen)}`, node.name === report.agent.node && "this node"].filter(Boolean);
  }

  function aboutPeer(peer) {
    const tunnel = report.agent.tunnels.find((tunnel) => tunnel.key === peer.key);
    return [`VPN peer ${peer.name}`, peer.allowedIPs.join(", "), peer.endpoint && `endpoint ${peer.endpoint}`,
      tunnel && `handshake here ${ago(report, tunnel.lastHandshake)}`, peer.reason].filter(Boolean);
  }

  function say(thing) {
    tip.replaceChildren(...thing.about().map((line, at) => h(at === 0 ? "b" : "span", {}, line)));
    tip.hidden = false;
    const at = thing.element.getBoundingClientRect();
    const room = document.documentElement.clientWidth;
    const left = Math.max(8, Math.min(at.left, room - tip.offsetWidth - 8));
    const under = at.bottom + 8 + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${left + window.scrollX}px`;
    tip.style.top = `${(under ? at.bottom + 6 : at.top - tip.offsetHeight - 6) + window.scrollY}px`;
  }

  function toggle(it) {
    opened.set(it.peers ? "peers" : it.location.name, !it.open);
    draw();
  }

  svg.addEventListener("keydown", (event) => {
    const thing = things.find((thing) => thing.element === document.activeElement);
    const keys = {
      "+": () => view.zoom(1.3), "=": () => view.zoom(1.3), "-": () => view.zoom(1 / 1.3), "0": () => view.fit(),
      Escape: hide,
      Enter: () => thing && (thing.toggle ? thing.toggle() : say(thing)),
      " ": () => thing && (thing.toggle ? thing.toggle() : say(thing)),
      Home: () => things[0].element.focus({ preventScroll: true }),
      End: () => things.at(-1).element.focus({ preventScroll: true }),
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow") && thing) {
      const next = nearest(things, thing, event.key);
      if (next) next.element.focus({ preventScroll: true });
    } else if (keys[event.key]) keys[event.key]();
    else return;
    event.preventDefault();
  });
  new ResizeObserver(() => { if (report) draw(); }).observe(svg);

  return {
    show(newReport, newFound) {
      [report, found] = [newReport, newFound];
      draw();
    },
    /** Goes to the first thing that was found. */
    goToFound() {
      const first = found && things.find((thing) => thing.element.matches(".box:not(.dim) > .head"));
      const hit = things.find((thing) => thing.hit) || first;
      if (hit) hit.element.focus({ preventScroll: true });
      return !!hit;
    },
    setAll(open) {
      opened.clear();
      everything = open;
      draw();
    },
    zoom: (factor) => view.zoom(factor),
    fit: () => view.fit(),
  };
}
