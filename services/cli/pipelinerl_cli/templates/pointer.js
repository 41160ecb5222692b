// Shows the values under the pointer or at the arrow keys. Positions are read back from the drawn lines, so that the page
// holds every number once.
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = {{ frame | tojson }};
const compact = (v) => { for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
  if (Math.abs(v) >= limit) return parseFloat((v / limit).toPrecision(3)) + unit; return String(parseFloat(v.toPrecision(3))); };
const clock = (v) => { const s = Math.round(v), two = (n) => String(n).padStart(2, "0"); return s < 60 ? s + " s"
  : s < 3600 ? Math.floor(s / 60) + ":" + two(s % 60) : Math.floor(s / 3600) + ":" + two(Math.floor(s / 60) % 60) + ":" + two(s % 60); };
const duration = (v) => Math.abs(v) < 1 ? parseFloat((v * 1000).toPrecision(3)) + " ms" : parseFloat(v.toPrecision(3)) + " s";
const forms = { number: compact, clock, duration };
for (const svg of document.querySelectorAll("svg[data-plot]")) {
  const { x0, x1, y0, y1, xKind, yKind } = svg.dataset, figure = svg.closest("figure"), tip = figure.querySelector(".tip");
  const pointer = svg.querySelector(".pointer"), lines = [...svg.querySelectorAll("polyline")].map((line) => ({
    label: line.dataset.label, stacked: "stacked" in line.dataset, points: line.getAttribute("points").split(" ").map((p) => p.split(",").map(Number)) }));
  const toX = (px) => +x0 + (px - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0);
  const toY = (py) => +y0 + (HEIGHT - BOTTOM - py) / (HEIGHT - TOP - BOTTOM) * (y1 - y0);
  const hide = () => { tip.hidden = true; pointer.setAttribute("visibility", "hidden"); };
  const show = (at) => {
    let below = 0;
    const rows = lines.map((line) => {
      const point = line.points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best), top = toY(point[1]);
      const value = line.stacked ? top - below : top;
      if (line.stacked) below = top;
      return { px: point[0], text: (line.label ? line.label + "  " : "") + forms[yKind](Math.abs(value) < 1e-9 ? 0 : value) };
    });
    const px = rows[0].px, box = svg.getBoundingClientRect();
    tip.textContent = [forms[xKind](toX(px)), ...rows.map((row) => row.text)].join("\n");
    pointer.setAttribute("visibility", "visible");
    pointer.firstElementChild.setAttribute("x1", px); pointer.firstElementChild.setAttribute("x2", px);
    tip.hidden = false;
    const left = box.left - figure.getBoundingClientRect().left + px / WIDTH * box.width;
    tip.style.left = (left > box.width * 0.55 ? left - tip.offsetWidth - 10 : left + 12) + "px";
    tip.style.top = "48px";
  };
  if (!lines.length) continue;
  const longest = lines.reduce((most, line) => line.points.length > most.points.length ? line : most).points;
  let index = longest.length - 1;
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * WIDTH;
    if (at < LEFT || at > WIDTH - RIGHT) hide(); else show(at);
  });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -longest.length, End: longest.length }[event.key];
    if (!by) return;
    event.preventDefault();
    index = Math.max(0, Math.min(longest.length - 1, index + by));
    show(longest[index][0]);
  });
}
