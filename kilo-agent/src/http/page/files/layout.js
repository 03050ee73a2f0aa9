// Where things are on the map: numbers only, nothing is drawn here.

export const CHIP = { height: 24, gap: 6 };
/** Letters of a name that fit on the widest chip. */
export const LONGEST = 26;
export const DOT = { size: 12, gap: 4 };
const PAD = 10;
const HEAD = 42;
const SPACE = 26;
const RING_SPACE = 44;
/** With no more boxes than this they stand in a ring, so that no line passes behind a box. */
const RING = 8;
const NARROWEST = 172;

/** The size of a box, and where its nodes are in it; of names only the lengths count. */
export function box(names, expanded, titleLength) {
  const nodes = names.length;
  const letters = Math.min(LONGEST, Math.max(8, ...names.map((name) => name.length)));
  const unit = expanded ? { ...CHIP, width: letters * 6.9 + 32 } : { width: DOT.size, height: DOT.size, gap: DOT.gap };
  const across = expanded ? Math.round(Math.sqrt((nodes * 50) / unit.width)) : Math.ceil(Math.sqrt(nodes * 2.5));
  const columns = Math.max(1, Math.min(Math.max(across, expanded ? 1 : 9), 40));
  const rows = Math.ceil(nodes / columns);
  const used = Math.min(columns, Math.max(1, nodes));
  const inner = used * unit.width + (used - 1) * unit.gap;
  const width = Math.max(NARROWEST, inner + 2 * PAD, Math.min(titleLength, 26) * 8 + 46);
  const height = HEAD + (rows > 0 ? rows * (unit.height + unit.gap) - unit.gap : 0) + PAD;
  const places = Array.from({ length: nodes }, (_, at) => ({
    x: PAD + (at % columns) * (unit.width + unit.gap),
    y: HEAD + Math.floor(at / columns) * (unit.height + unit.gap),
  }));
  return { width, height, places, unit };
}

/** Gives each box its x and y; returns the size of the whole. Aspect: width by height of the room there is. */
export function arrange(boxes, aspect) {
  if (boxes.length > 2 && boxes.length <= RING && aspect > 0.8) ring(boxes, aspect);
  else shelves(boxes, aspect);
  const left = Math.min(...boxes.map((it) => it.x));
  const top = Math.min(...boxes.map((it) => it.y));
  for (const it of boxes) {
    it.x -= left - PAD;
    it.y -= top - PAD;
  }
  return {
    width: Math.max(...boxes.map((it) => it.x + it.width)) + PAD,
    height: Math.max(...boxes.map((it) => it.y + it.height)) + PAD,
  };
}

function ring(boxes, aspect) {
  for (let radius = 60; ; radius *= 1.06) {
    boxes.forEach((it, at) => {
      const angle = (2 * Math.PI * at) / boxes.length - Math.PI / 2;
      it.x = Math.cos(angle) * radius * Math.min(aspect, 2) - it.width / 2;
      it.y = Math.sin(angle) * radius - it.height / 2;
    });
    const apart = boxes.every((a, at) => boxes.slice(at + 1).every((b) =>
      a.x + a.width + RING_SPACE < b.x || b.x + b.width + RING_SPACE < a.x
      || a.y + a.height + RING_SPACE < b.y || b.y + b.height + RING_SPACE < a.y));
    if (apart) return;
  }
}

function shelves(boxes, aspect) {
  const area = boxes.reduce((sum, it) => sum + (it.width + SPACE) * (it.height + SPACE), 0);
  const widest = Math.max(...boxes.map((it) => it.width));
  const wanted = Math.max(widest, Math.sqrt(area * aspect) * 1.04);
  let [x, y, tallest] = [0, 0, 0];
  for (const it of boxes) {
    if (x > 0 && x + it.width > wanted) {
      y += tallest + SPACE;
      [x, tallest] = [0, 0];
    }
    [it.x, it.y] = [x, y];
    x += it.width + SPACE;
    tallest = Math.max(tallest, it.height);
  }
}

/** The nearest of `things` (x, y) from one of them in a direction; null when there is none. */
export function nearest(things, from, key) {
  const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  let [best, least] = [null, Infinity];
  for (const thing of things) {
    const [x, y] = [thing.x - from.x, thing.y - from.y];
    const along = x * dx + y * dy;
    if (thing === from || along <= 0.5) continue;
    const aside = Math.abs(x * dy) + Math.abs(y * dx);
    const cost = along + 2.5 * aside;
    if (cost < least) [best, least] = [thing, cost];
  }
  return best;
}
