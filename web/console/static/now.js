// The last hour, or the time of an incident: four charts on one axis with the marks and lives above them. A drag zooms all of them, a click or Enter
// opens the answers of that time.
(() => {
  const HEIGHT_PX = 132;
  const AXIS_PX = 52;
  const RIGHT_PX = 44;
  const NARROW_PX = 640;
  const CLICK_PX = 4;
  const AROUND_S = 30;
  const LEAST_S = 60;
  const LEAST_DRAG_S = 10;
  const GAP_PX = 90;
  const DASH = [5, 4];
  const EDGE = 0.03;

  const $ = (id) => document.getElementById(id);
  const time = (seconds, parts) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false, hour: "2-digit", minute: "2-digit", ...parts });

  // The numbers: times in seconds and one column per line, of the last hour

  let times = [];
  let columns = {};

  function replaceNumbers({ at_s, step_s, columns: sent }) {
    const [first] = Object.values(sent ?? {});
    times = (first ?? []).map((_, number) => at_s + number * step_s);
    columns = sent ?? {};
  }

  function mergeNumbers({ at_s, step_s, columns: sent }) {
    const [first] = Object.values(sent ?? {});
    if (!first?.length) return;
    const kept = times.filter((at) => at < at_s).length;
    const most = Math.ceil((recent.to_s - recent.from_s) / step_s);
    // A reader that missed more than was sent has the whole page sent.
    times = [...times.slice(0, kept), ...first.map((_, number) => at_s + number * step_s)].slice(-most);
    for (const [name, values] of Object.entries(sent)) {
      columns[name] = [...(columns[name] ?? []).slice(0, kept), ...values].slice(-most);
    }
  }

  // Colours, which follow the theme

  let probe;
  function colourOf(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }

  // The shown range, of the charts, the marks and the lives

  let recent = {};
  let range = [0, 0];
  let zoomed = false;
  let plots = [];
  const sizes = new ResizeObserver(() => onResize());

  function setRange(from, to, byUser) {
    zoomed = byUser;
    range = [from, to];
    $("whole-hour").hidden = !zoomed;
    for (const plot of plots) plot.setScale("x", { min: from, max: to });
    moveStrips();
  }

  const showWholeHour = () => setRange(recent.from_s, recent.to_s, false);

  // The strips are as wide as the hour, and moved so that the shown range fills their frames.
  function moveStrips() {
    const [from, to] = range;
    const share = (to - from) / (recent.to_s - recent.from_s);
    for (const strip of document.querySelectorAll("#hour .zoomed")) {
      strip.setAttribute("width", `${100 / share}%`);
      strip.setAttribute("x", `${(-100 * (from - recent.from_s)) / (to - from)}%`);
    }
    drawAxis();
  }

  function drawAxis() {
    const axis = $("hour-axis");
    const [from, to] = range;
    const most = Math.max(2, Math.floor(axis.getBoundingClientRect().width / GAP_PX));
    const step = [10, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 10800, 43200].find((size) => (to - from) / size <= most) ?? 86400;
    const labels = [];
    const margin = (to - from) * EDGE; // a label at the edge would be cut
    for (let at = Math.ceil((from + margin) / step) * step; at < to - margin; at += step) labels.push(at);
    while (axis.children.length > labels.length) axis.lastElementChild.remove();
    labels.forEach((at, number) => {
      const label = axis.children[number] ?? axis.appendChild(document.createElementNS(axis.namespaceURI, "text"));
      label.setAttribute("x", `${(100 * (at - from)) / (to - from)}%`);
      label.setAttribute("y", "14");
      label.textContent = time(at, step < 60 ? { second: "2-digit" } : {});
    });
    const zone = new Intl.DateTimeFormat([], { timeZoneName: "short" }).formatToParts(new Date(to * 1000));
    $("zone").textContent = zone.find((part) => part.type === "timeZoneName").value;
  }

  // One chart

  const written = (value, unit) => (value == null ? "–" : `${Number(value.toPrecision(3)).toLocaleString()}${unit ? ` ${unit}` : ""}`);
  const areEqual = (one, other) => one.every((value, number) => value === other[number]);

  // Without a difference between p50 and p95 there is one line.
  function linesOf(chart) {
    const [p50] = chart.lines;
    if (p50.column !== "p50" || !areEqual(columns.p50 ?? [], columns.p95 ?? [])) return chart.lines;
    return [{ ...p50, label: "every answer" }];
  }

  function findAlone(values) {
    const alone = [];
    values.forEach((value, number) => {
      if (value != null && values[number - 1] == null && values[number + 1] == null) alone.push(number);
    });
    return alone;
  }

  const dataOf = (lines) => [times, ...lines.map(({ column }) => columns[column] ?? [])];

  function openAnswers(at) {
    const iso = (seconds) => `${new Date(seconds * 1000).toISOString().slice(0, 19)}Z`;
    location.assign(`/requests?${new URLSearchParams({ from: iso(at - AROUND_S), to: iso(at + AROUND_S) })}`);
  }

  function describe(plot) {
    const { idx } = plot.cursor;
    if (idx == null || times[idx] == null) return;
    const values = plot.lines.map(({ label, column, right }) => `${label} ${written(columns[column]?.[idx], right ? "" : plot.chart.unit)}`);
    $("hour-detail").textContent = `${time(times[idx], { second: "2-digit", timeZoneName: "short" })} · ${plot.chart.title}: ${values.join(", ")}`;
  }

  function axes(chart, isNarrow) {
    const ink = { stroke: () => colourOf("dim"), font: "11px system-ui, sans-serif" };
    const grid = { stroke: () => colourOf("line"), width: 1 };
    const unit = chart.unit ? ` ${chart.unit}` : "";
    const found = [
      { ...ink, grid, ticks: { show: false }, size: 22, space: GAP_PX, values: (_, at) => at.map((one) => time(one, range[1] - range[0] < 600 ? { second: "2-digit" } : {})) },
      { ...ink, grid, ticks: { show: false }, size: isNarrow ? AXIS_PX - 8 : AXIS_PX, space: 28, values: (_, values) => values.map((value) => `${Number(value.toPrecision(3))}${unit}`) },
    ];
    const hasRight = chart.lines.some(({ right }) => right) && !isNarrow;
    if (hasRight) found.push({ ...ink, scale: "right", side: 1, grid: { show: false }, ticks: { show: false }, size: RIGHT_PX, space: 28 });
    return found;
  }

  const fromZero = (_, __, most) => [0, most > 0 ? most * 1.1 : 1];

  function build(chart) {
    const canvas = $(`canvas-${chart.key}`);
    const isNarrow = window.innerWidth <= NARROW_PX;
    const lines = linesOf(chart);
    canvas.replaceChildren();
    $(`legend-${chart.key}`).replaceChildren();
    const options = {
      width: canvas.clientWidth,
      height: HEIGHT_PX,
      padding: [8, 0, 0, 0],
      cursor: { sync: { key: "hour" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => null }, points: { size: 6 } },
      legend: { live: true, mount: (_, legend) => $(`legend-${chart.key}`).append(legend) },
      scales: { x: { time: true, auto: false, min: range[0], max: range[1] }, y: { range: fromZero }, right: { range: fromZero } },
      axes: axes(chart, isNarrow),
      series: [
        { label: "", value: (_, at) => (at == null ? "" : time(at, { second: "2-digit" })) },
        ...lines.map(({ label, colour, dashed, right }) => ({
          label,
          scale: right ? "right" : "y",
          stroke: () => colourOf(colour),
          width: 1.6,
          dash: dashed ? DASH : [],
          // A line shows no value that has no neighbour.
          points: { show: true, size: 4, fill: () => colourOf(colour), filter: ({ data }, number) => findAlone(data[number]) },
          value: (_, value) => written(value, right ? "" : chart.unit),
        })),
      ],
      hooks: { setSelect: [onSelect], setCursor: [(plot) => plot === pointed && describe(plot)] },
    };
    const plot = new uPlot(options, dataOf(lines), canvas);
    Object.assign(plot, { chart, lines, isNarrow });
    listen(plot);
    return plot;
  }

  let pointed = null;

  function onSelect(plot) {
    const { left, width } = plot.select;
    if (plot !== pointed || width < CLICK_PX) return;
    const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    for (const each of plots) each.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (to - from >= LEAST_DRAG_S) setRange(from, to, true);
  }

  function listen(plot) {
    let pressedAt = 0;
    plot.over.addEventListener("pointerenter", () => (pointed = plot));
    plot.over.addEventListener("pointerdown", (event) => (pressedAt = event.clientX));
    plot.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - pressedAt) < CLICK_PX) openAnswers(plot.posToVal(plot.cursor.left, "x"));
    });
  }

  // Keys: arrows move along a chart or a row of marks, Enter opens, + and - zoom

  function moveCursor(plot, by) {
    pointed = plot;
    const start = times.findLastIndex((at) => at <= range[1]);
    const index = Math.min(Math.max((plot.cursor.idx ?? start) + by, 0), times.length - 1);
    plot.setCursor({ left: plot.valToPos(times[index], "x"), top: 0 });
  }

  function zoomAround(plot, factor) {
    const at = times[plot.cursor.idx] ?? (range[0] + range[1]) / 2;
    const length = (range[1] - range[0]) * factor;
    if (length < LEAST_S) return;
    if (length >= recent.to_s - recent.from_s) return showWholeHour();
    const from = Math.min(Math.max(at - length / 2, recent.from_s), recent.to_s - length);
    setRange(from, from + length, true);
  }

  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const host = event.target.closest?.(".plot");
    const plot = plots.find(({ root }) => host?.contains(root));
    if (plot && step) moveCursor(plot, step * (event.shiftKey ? 12 : 1));
    else if (plot && event.key === "Enter" && plot.cursor.idx != null) openAnswers(times[plot.cursor.idx]);
    else if (plot && (event.key === "+" || event.key === "-")) zoomAround(plot, event.key === "+" ? 0.5 : 2);
    else if (!step || !moveAlongStrip(event.target, step)) return;
    event.preventDefault();
  }

  function moveAlongStrip(target, step) {
    const links = [...(target.closest?.(".strip")?.querySelectorAll("a") ?? [])];
    links[links.indexOf(target) + step]?.focus();
    return links.length > 0;
  }

  function showMark({ target }) {
    const text = target.closest?.("#hour .strip a")?.querySelector("title")?.textContent;
    if (text) $("hour-detail").textContent = text;
  }

  // The server writes the times of marks and lives in UTC; people read them in their zone.

  function showLocalTimes() {
    const local = (iso) => time(Date.parse(iso) / 1000, { second: "2-digit", timeZoneName: "short" });
    for (const title of document.querySelectorAll("#hour .strip title")) {
      const text = title.textContent.replace(/\d{4}-\d\d-\d\dT[\d:.]+Z/g, local);
      if (text !== title.textContent) title.textContent = text;
    }
  }

  // Updates

  let wholeText = "";

  function update() {
    showLocalTimes();
    const text = $("whole").textContent;
    if (text !== wholeText) {
      wholeText = text;
      replaceNumbers(JSON.parse(text));
    }
    recent = JSON.parse($("recent").textContent);
    if (!recent.charts || !$("hour-axis")) return;
    const hasNumbers = Object.values(recent.newest.columns).some(({ length }) => length > 0);
    if (!times.length && hasNumbers) return window.fleetRefresh(); // the page was opened without Redis
    mergeNumbers(recent.newest);
    const isStale = ({ root, chart, lines }) => !root.isConnected || linesOf(chart).length !== lines.length;
    if (plots.length === 0 || plots.some(isStale)) draw();
    else {
      for (const plot of plots) plot.setData(dataOf(plot.lines), false);
      if (zoomed) setRange(...range, true);
      else showWholeHour();
    }
  }

  function draw() {
    for (const plot of plots) plot.destroy();
    plots = [];
    if (!zoomed) range = [recent.from_s, recent.to_s];
    plots = recent.charts.map(build);
    moveStrips();
    sizes.disconnect();
    for (const { key } of recent.charts) sizes.observe($(`canvas-${key}`));
  }

  function onResize() {
    if (plots.some(({ isNarrow }) => isNarrow !== window.innerWidth <= NARROW_PX)) return draw();
    for (const plot of plots) {
      const { clientWidth: width } = plot.root.parentElement;
      if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT_PX });
    }
    drawAxis();
  }

  const redraw = () => plots.forEach((plot) => plot.redraw(false, true));

  document.addEventListener("DOMContentLoaded", () => {
    probe = document.body.appendChild(document.createElement("i"));
    probe.hidden = true;
    update();
    document.addEventListener("click", ({ target }) => target.closest?.("#whole-hour") && showWholeHour());
    document.addEventListener("keydown", onKey);
    document.addEventListener("pointerover", showMark);
    document.addEventListener("focusin", showMark);
    for (const swapped of ["htmx:sse:after:message", "htmx:after:swap"]) document.addEventListener(swapped, update);
    new MutationObserver(redraw).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  });
})();
