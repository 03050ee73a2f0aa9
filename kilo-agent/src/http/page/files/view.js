// What part of the map is seen: zooming by buttons, keys, wheel with Ctrl and two fingers; dragging.

/** Text is readable down to this many pixels a unit. */
const READABLE = 0.62;
const LARGEST = 4;

/** Moves the viewBox of `svg` over a map whose size `size()` returns. */
export function viewOf(svg, size, moved) {
  let view = { x: 0, y: 0, scale: 1 };
  const room = () => ({ width: svg.clientWidth || 600, height: svg.clientHeight || 400 });
  const smallest = () => Math.min(room().width / size().width, room().height / size().height, 1);
  const show = () => {
    const { width, height } = room();
    view.scale = Math.min(LARGEST, Math.max(smallest(), view.scale));
    const [across, down] = [width / view.scale, height / view.scale];
    const keep = (at, seen, all) => (seen >= all ? (all - seen) / 2 : Math.min(Math.max(at, 0), all - seen));
    view.x = keep(view.x, across, size().width);
    view.y = keep(view.y, down, size().height);
    svg.setAttribute("viewBox", `${view.x} ${view.y} ${across} ${down}`);
    moved();
  };
  /** Zooms; the point of the room given stays where it is. */
  const zoom = (factor, at) => {
    const { width, height } = room();
    const point = at || { x: width / 2, y: height / 2 };
    const [x, y] = [view.x + point.x / view.scale, view.y + point.y / view.scale];
    view.scale = Math.min(LARGEST, Math.max(smallest(), view.scale * factor));
    [view.x, view.y] = [x - point.x / view.scale, y - point.y / view.scale];
    show();
  };
  const fit = () => {
    view = { x: 0, y: 0, scale: smallest() };
    show();
  };
  /** Brings a rectangle into view, as little as needed, or to the middle. */
  const reveal = (it, middle) => {
    const { width, height } = room();
    const [across, down] = [width / view.scale, height / view.scale];
    const isIn = it.x >= view.x && it.y >= view.y && it.x + it.width <= view.x + across && it.y + it.height <= view.y + down;
    if (isIn && !middle) return;
    [view.x, view.y] = [it.x + it.width / 2 - across / 2, it.y + it.height / 2 - down / 2];
    show();
  };
  /** The whole, or as much as is readable around what matters most. */
  const begin = (it) => {
    view = { x: 0, y: 0, scale: Math.max(smallest(), Math.min(READABLE, 1)) };
    if (it && smallest() < READABLE) reveal(it, true);
    else fit();
  };
  const at = (event) => {
    const { left, top } = svg.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  };
  svg.addEventListener("wheel", (event) => {
    // The wheel alone scrolls the page.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), at(event));
  }, { passive: false });
  const fingers = new Map();
  let dragged = 0;
  svg.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, at(event));
    dragged = 0;
  });
  svg.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) return;
    const now = at(event);
    const other = [...fingers].find(([id]) => id !== event.pointerId);
    dragged += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
    if (other) {
      const apart = (point) => Math.hypot(point.x - other[1].x, point.y - other[1].y) || 1;
      zoom(apart(now) / apart(before), other[1]);
    } else if (dragged > 4) {
      svg.setPointerCapture(event.pointerId);
      view.x -= (now.x - before.x) / view.scale;
      view.y -= (now.y - before.y) / view.scale;
      show();
    }
    fingers.set(event.pointerId, now);
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
    svg.addEventListener(end, (event) => fingers.delete(event.pointerId));
  }
  return { zoom, fit, reveal, begin, show, wasDragged: () => dragged > 4, isAll: () => view.scale <= smallest() * 1.01 };
}
