"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const byId = (id) => document.getElementById(id);
  const COLOURS = 10;
  const colour = (i) => css(`--c${i % COLOURS}`);

  // Every text goes in as text: nothing here ever parses markup.
  function make(tag, options = {}, ...children) {
    const { text, ...rest } = options;
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(rest)) {
      if (name === "class") element.className = value;
      else element.setAttribute(name, value);
    }
    if (text !== undefined) element.textContent = text;
    element.append(...children);
    return element;
  }

  function number(x, form) {
    if (x === null || x === undefined) return "–";
    if (form === "share") return `${(100 * x).toFixed(x && Math.abs(x) < 1e-3 ? 3 : 1)}%`;
    if (x === 0) return "0";
    const size = Math.abs(x);
    if (size < 1e-3 || size >= 1e6) return x.toExponential(2).replace("e+", "e").replace("e-", "e−").replace(/^-/, "−");
    if (Number.isInteger(x)) return x.toLocaleString("en").replace("-", "−");
    if (size < 0.1) return String(parseFloat(x.toPrecision(3))).replace("-", "−");
    const digits = Math.min(Math.max(0, 3 - Math.floor(Math.log10(size))), 3);
    return x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");
  }
  const duration = (seconds) => (seconds >= 1 || seconds === 0 ? `${number(seconds)} s` : `${parseFloat((1000 * seconds).toPrecision(3))} ms`);
  const known = (values) => values.filter((x) => x !== null && x !== undefined);

  // Curves

  const plots = [];
  const dense = data.x;
  const every = [...dense, ...Object.values(data.sparse).flatMap(([steps]) => steps)];
  const [start, end] = every.length ? [every.reduce((a, b) => Math.min(a, b)), every.reduce((a, b) => Math.max(a, b))] : [0, 1];
  const few = dense.length <= 60;

  function smoothed(values) {
    const reach = Math.max(1, Math.round(values.length / 40));
    return values.map((x, i) => {
      if (x === null) return null;
      const window = known(values.slice(Math.max(0, i - reach), i + reach + 1));
      return window.reduce((a, b) => a + b, 0) / window.length;
    });
  }

  // The columns of a chart: steps, and per curve its values and, where it has them, its band's ends.
  function columns(chart) {
    const isSparse = chart.series.some((s) => s.name in data.sparse);
    if (!isSparse) {
      const curves = chart.series.map((s) => ({ ...s, values: data.dense[s.name], low: data.low[s.name], high: data.high[s.name] }));
      return [dense, curves];
    }
    const names = chart.series.flatMap((s) => [s.name, s.low, s.high].filter(Boolean));
    const steps = [...new Set(names.flatMap((name) => data.sparse[name][0]))].sort((a, b) => a - b);
    const aligned = (name) => {
      if (!name) return undefined;
      const at = new Map(data.sparse[name][0].map((step, i) => [step, data.sparse[name][1][i]]));
      return steps.map((step) => at.get(step) ?? null);
    };
    return [steps, chart.series.map((s) => ({ ...s, values: aligned(s.name), low: aligned(s.low), high: aligned(s.high) }))];
  }

  const alpha = (hex, a) => hex + Math.round(255 * a).toString(16).padStart(2, "0");

  function axes(form) {
    const shared = { stroke: () => css("--dim"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: () => css("--line"), width: 1 } };
    return [
      { ...shared, size: 26, gap: 4, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6], values: (u, ticks) => ticks.map((x) => x.toLocaleString("en")) },
      { ...shared, size: 52, gap: 4, space: 34, values: (u, ticks) => tickTexts(ticks, form) },
    ];
  }

  function tickTexts(ticks, form) {
    const largest = Math.max(...ticks.map(Math.abs));
    const gap = ticks.length > 1 ? ticks[1] - ticks[0] : largest || 1;
    if (form === "share") return ticks.map((x) => `${(100 * x).toFixed(gap < 0.0099 ? (gap < 0.00099 ? 2 : 1) : 0)}%`);
    const power = largest && (largest < 1e-3 || largest >= 1e6) ? Math.floor(Math.log10(largest)) : 0;
    const unit = gap / 10 ** power;
    let digits = 0;
    while (digits < 6 && Math.abs(unit * 10 ** digits - Math.round(unit * 10 ** digits)) > 1e-6 * unit * 10 ** digits) digits++;
    if (power) return ticks.map((x) => (x === 0 ? "0" : `${(x / 10 ** power).toFixed(digits)}e${power}`.replaceAll("-", "−")));
    return ticks.map((x) => x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−"));
  }

  function rangeY(form) {
    return (u, low, high) => {
      if (low === null || high === null) return [0, 1];
      const pad = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || (form === "share" ? 0.5 : 1);
      const from = low >= 0 && low - pad < 0 ? 0 : low - pad;
      const to = form === "share" ? Math.min(1.0001, high + pad) : high + pad;
      return [from, to > from ? to : from + 1];
    };
  }

  function options(place, form, series, bands, keys) {
    return {
      width: place.clientWidth, height: place.clientHeight, padding: [8, 22, 0, 0], legend: { show: false }, series, bands,
      cursor: { sync: { key: "steps", scales: ["x", null] }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) }, y: { range: rangeY(form) } },
      axes: axes(form),
      hooks: { setCursor: [(u) => keys(u.cursor.idx)] },
    };
  }

  function frame(chart, parent, tall) {
    const at = make("span", { class: "at" });
    const keys = make("div", { class: "keys" });
    const plot = make("div", { class: tall ? "plot tall" : "plot", role: "img", "aria-label": `${chart.title} over the steps` });
    parent.append(make("div", { class: "chart" }, at, make("h3", { text: chart.title }), make("div", { class: "about", text: chart.about, title: chart.about }), keys, plot));
    return { at, keys, plot };
  }

  function key(parent, i, label) {
    const swatch = make("i", { class: "swatch" });
    swatch.style.background = `var(--c${i % COLOURS})`;
    const value = make("b");
    parent.append(make("span", {}, swatch, make("em", { text: label }), value));
    return value;
  }

  // A plot is put together again when its width, the colours or the smoothing change.
  function plotted(build, place) {
    const plot = { place, build, live: null };
    plots.push(plot);
    return plot;
  }
  function redraw(plot) {
    if (plot.live) plot.live.destroy();
    plot.live = plot.place.clientWidth ? plot.build(plot.place) : null;
  }

  function drawChart(chart, parent) {
    const { at, keys, plot } = frame(chart, parent, false);
    const [steps, curves] = columns(chart);
    const values = curves.map((curve, i) => key(keys, i, curve.label));
    const show = (index) => {
      const here = index !== null && index !== undefined;
      at.textContent = here ? `step ${steps[index].toLocaleString("en")}` : "";
      curves.forEach((curve, i) => {
        const j = here ? index : curve.values.findLastIndex((x) => x !== null);
        const ends = curve.low && curve.low[j] !== null ? ` [${number(curve.low[j], chart.form)}, ${number(curve.high[j], chart.form)}]` : "";
        values[i].textContent = number(curve.values[j], chart.form) + (data.per_point > 1 && !(curve.name in data.sparse) ? "" : ends);
      });
    };
    show(null);
    plotted((place) => {
      const table = [steps], series = [{}], bands = [];
      const isSmooth = byId("smooth").checked;
      const dots = steps.length <= 60;
      curves.forEach((curve, i) => {
        if (curve.low) {
          table.push(curve.high, curve.low);
          const hidden = { stroke: "transparent", points: { show: false }, spanGaps: true };
          series.push(hidden, hidden);
          bands.push({ series: [series.length - 2, series.length - 1], fill: () => alpha(colour(i), 0.16) });
        }
        const smooth = isSmooth && !(curve.name in data.sparse) && !few;
        if (smooth) {
          table.push(curve.values);
          series.push({ stroke: () => alpha(colour(i), 0.3), width: 1, points: { show: false } });
        }
        table.push(smooth ? smoothed(curve.values) : curve.values);
        series.push({ stroke: () => colour(i), width: 1.8, spanGaps: true, points: { show: dots, size: 5, fill: () => colour(i) } });
      });
      return new uPlot(options(place, chart.form, series, bands, show), [xEnds(table)][0], place);
    }, plot);
  }

  // All charts span the run's steps, so that what stands below one another happened at the same time.
  function xEnds(table) {
    const [steps, ...rest] = table;
    const before = steps[0] > start ? [start] : [], after = steps.at(-1) < end ? [end] : [];
    if (!before.length && !after.length) return table;
    return [[...before, ...steps, ...after], ...rest.map((column) => [...before.map(() => null), ...column, ...after.map(() => null)])];
  }

  function drawTiming(parent) {
    const totals = data.phases.map((phase) => dense.map((_, i) => phase.of.reduce((sum, name) => sum + (data.dense[name][i] ?? 0), 0)));
    const { at, keys, plot } = frame({ title: "Seconds of a step", about: data.per_point > 1 ? `means of ${data.per_point} steps` : "by phase, stacked" }, parent, true);
    const values = data.phases.map((phase, i) => key(keys, i, phase.name));
    const show = (index) => {
      const here = index !== null && index !== undefined;
      const seconds = totals.map((column) => (here ? column[index] : column.reduce((a, b) => a + b, 0) / column.length));
      at.textContent = `${here ? `step ${dense[index].toLocaleString("en")}` : "mean"}: ${duration(seconds.reduce((a, b) => a + b, 0))}`;
      seconds.forEach((x, i) => (values[i].textContent = duration(x)));
    };
    show(null);
    const stacked = [];
    totals.forEach((column, i) => stacked.push(column.map((x, j) => x + (i ? stacked[i - 1][j] : 0))));
    const bars = dense.length <= 80;
    plotted((place) => {
      const order = data.phases.map((_, i) => i).reverse(); // the whole first, so that lower ones lie upon it
      const paths = bars ? uPlot.paths.bars({ size: [0.86, 48], radius: 0 }) : uPlot.paths.stepped({ align: 1 });
      const series = [{}, ...order.map((i) => ({ stroke: () => (bars ? "transparent" : colour(i)), width: bars ? 0 : 0.5, fill: () => colour(i), paths, points: { show: false } }))];
      const made = options(place, "number", series, [], show);
      made.scales.y.range = (u, low, high) => [0, (high || 1) * 1.05];
      if (bars) made.scales.x.range = (u, low, high) => [low - 0.6, high + 0.6];
      made.cursor.points = { show: false };
      return new uPlot(made, [dense, ...order.map((i) => stacked[i])], place);
    }, plot);
  }

  function drawShares() {
    const sums = data.phases.map((phase) => phase.of.reduce((sum, name) => sum + data.dense[name].reduce((a, b) => a + (b ?? 0), 0), 0));
    const whole = sums.reduce((a, b) => a + b, 0) || 1;
    data.phases.forEach((phase, i) => {
      const part = make("i", { title: `${phase.name} ${((100 * sums[i]) / whole).toFixed(1)}%` });
      part.style.cssText = `width: ${(100 * sums[i]) / whole}%; background: var(--c${i % COLOURS})`;
      byId("share").append(part);
    });
    for (const swatch of document.querySelectorAll("[data-phase]")) {
      const i = data.phases.findIndex((phase) => phase.of.includes(`timing_s/${swatch.dataset.phase}`));
      if (i >= 0) swatch.style.background = `var(--c${i % COLOURS})`;
    }
  }

  function drawTable() {
    const body = byId("metrics").tBodies[0];
    const rows = [...Object.entries(data.dense).map(([name, values]) => [name, dense, values]), ...Object.entries(data.sparse).map(([name, [steps, values]]) => [name, steps, values])];
    rows.sort(([a], [b]) => (a < b ? -1 : 1));
    for (const [name, steps, values] of rows) {
      const numbers = known(values);
      const low = numbers.reduce((a, b) => Math.min(a, b), Infinity), high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
      const cells = [numbers[0], numbers.at(-1), low, high].map((x) => make("td", { class: "right", text: number(Number.isFinite(x) ? x : null) }));
      const row = make("tr", {}, make("td", { text: name }), ...cells, make("td", {}, sparkline(steps, values, low, high)));
      body.append(row);
    }
    byId("filter").addEventListener("input", (event) => {
      const wanted = event.target.value.toLowerCase();
      for (const row of body.rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
    });
  }

  function sparkline(steps, values, low, high) {
    const NS = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(NS, "svg"), path = document.createElementNS(NS, "path");
    svg.setAttribute("viewBox", "0 0 160 22");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    let d = "", pen = false;
    values.forEach((x, i) => {
      if (x === null) return (pen = pen && values.length !== dense.length);
      const px = end > start ? (160 * (steps[i] - start)) / (end - start) : 80;
      const py = high > low ? 20 - (18 * (x - low)) / (high - low) : 11;
      d += `${pen ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
      pen = true;
    });
    path.setAttribute("d", values.length > 1 ? d : d + "h1");
    svg.append(path);
    return svg;
  }

  if (byId("charts")) {
    byId("smooth").checked = dense.length > 150;
    byId("smooth").disabled = few;
    let section = "", grid;
    for (const chart of data.charts) {
      if (chart.section === "Time") continue;
      if (chart.section !== section) {
        section = chart.section;
        grid = make("div", { class: "grid" });
        byId("charts").append(make("div", { class: "group", text: section }), grid);
      }
      drawChart(chart, grid);
    }
    byId("smooth").addEventListener("change", () => plots.forEach(redraw));
    let tabled = false;
    byId("all").addEventListener("toggle", () => {
      if (!tabled) drawTable();
      tabled = true;
    });
  }
  if (byId("timing") && data.phases.length) {
    drawShares();
    drawTiming(byId("stacked"));
    for (const chart of data.charts) if (chart.section === "Time") drawChart(chart, byId("timing"));
  }
  plots.forEach(redraw);
  let widths = plots.map((plot) => plot.place.clientWidth);
  addEventListener("resize", () => {
    plots.forEach((plot, i) => {
      if (plot.place.clientWidth !== widths[i]) plot.live ? plot.live.setSize({ width: plot.place.clientWidth, height: plot.place.clientHeight }) : redraw(plot);
    });
    widths = plots.map((plot) => plot.place.clientWidth);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(redraw));

  // Samples

  if (!byId("samples")) return;
  const change = (row, t) => (row.ref_log_prob && row.log_probs ? row.log_probs[t] - row.ref_log_prob[t] : undefined);
  const VIEWS = [
    { name: "advantage", of: (row, t) => row.advantages?.[t], signed: true, low: "worse than expected", high: "better" },
    { name: "change from the reference", of: change, signed: true, low: "less likely", high: "likelier than the reference says" },
    { name: "surprise", of: (row, t) => (row.log_probs ? -row.log_probs[t] : undefined), signed: false, low: "certain", high: "rare (nats)" },
  ];
  const all = data.samples.flatMap((group) => group.rows);
  for (const view of VIEWS) {
    const sizes = all.flatMap((row) => (row.tokens ?? []).map((_, t) => view.of(row, t))).filter((x) => Number.isFinite(x)).map(Math.abs).sort((a, b) => a - b);
    view.any = sizes.length > 0;
    view.most = sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 1 : 1;
  }
  const views = VIEWS.filter((view) => view.any);
  let view = views[0], group = data.samples.at(-1), chosen = null;

  function buttons(parent, items, label, isOn, choose) {
    for (const item of items) {
      const button = make("button", { type: "button", text: label(item) });
      button.addEventListener("click", () => {
        choose(item);
        press();
      });
      button.isOn = () => isOn(item);
      parent.append(button);
    }
    const press = () => [...parent.children].forEach((button) => button.setAttribute("aria-pressed", button.isOn()));
    press();
  }

  const visible = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0))).replace(/[\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (c) => `⟨${c.charCodeAt(0).toString(16)}⟩`);

  function paint(span) {
    const x = view ? view.of(span.row, span.t) : undefined;
    const share = Number.isFinite(x) ? Math.min(1, Math.abs(x) / view.most) : 0;
    span.className = `t ${span.other ? "other" : !share ? "" : !view.signed ? "rare" : x > 0 ? "pos" : "neg"}`;
    span.style.setProperty("--a", (0.62 * share).toFixed(3));
  }

  function responseOf(row) {
    const place = make("div", { class: "response", dir: "auto", tabindex: "0" });
    if (!row.tokens) {
      place.textContent = visible(row.response ?? "");
      return place;
    }
    const other = new Set(row.not_own ?? []);
    const gap = row.tokens_left_out;
    row.tokens.forEach((token, t) => {
      if (t === gap?.after) place.append(make("span", { class: "gap", text: `… ${gap.count.toLocaleString("en")} tokens left out; rollouts/ has them if trainer.rollout_dump is on …` }));
      const span = make("span");
      for (const part of visible(token).split(/(\n)/)) {
        if (part === "\n") span.append(make("span", { class: "sign", text: "⏎" }), "\n");
        else if (part) span.append(part);
      }
      if (!token) span.append(make("span", { class: "sign", text: "◌" }));
      Object.assign(span, { row, t, other: other.has(t) });
      paint(span);
      place.append(span);
    });
    const pick = (event) => {
      const span = event.target.closest(".t");
      if (span && span.row) inspect(span);
    };
    place.addEventListener("pointerover", pick);
    place.addEventListener("click", pick);
    return place;
  }

  function inspect(span) {
    if (chosen) chosen.classList.remove("on");
    chosen = span;
    span.classList.add("on");
    const { row, t } = span;
    const signed = (x) => (x > 0 ? "+" : "") + number(x);
    const facts = [`token ${t + 1 + (t >= row.tokens_left_out?.after ? row.tokens_left_out.count : 0)} of ${row.length ?? row.tokens.length}`];
    if (Number.isFinite(row.advantages?.[t])) facts.push(`advantage ${signed(row.advantages[t])}`);
    if (Number.isFinite(row.log_probs?.[t])) facts.push(`log-prob ${number(row.log_probs[t])} (${number(Math.exp(row.log_probs[t]), "share")})`);
    if (Number.isFinite(row.ref_log_prob?.[t])) facts.push(`reference ${number(row.ref_log_prob[t])}`, `change ${signed(change(row, t))}`);
    if (span.other) facts.push("not the policy's own");
    byId("inspector").hidden = false;
    byId("inspector").replaceChildren(make("code", { text: JSON.stringify(visible(row.tokens[t])) }), ...facts.map((text) => make("span", { text })));
  }

  function cardOf(row) {
    const head = make("div", { class: "head" });
    const fact = (label, text) => head.append(make("span", {}, `${label} `, make("b", { text })));
    fact("score", row.score === null || row.score === undefined ? "failed" : number(row.score));
    if (Number.isFinite(row.advantage)) fact("advantage", (row.advantage > 0 ? "+" : "") + number(row.advantage));
    if (row.length !== undefined) fact("tokens", number(row.length));
    if (row.finish_reason) fact("ended by", row.finish_reason === "length" ? "the length limit" : row.finish_reason);
    for (const [name, value] of Object.entries(row.extras ?? {})) fact(name, visible(typeof value === "number" ? number(value) : String(JSON.stringify(value)).slice(0, 120)));
    return make("article", { class: "card" }, head, make("div", { class: "prompt", dir: "auto", tabindex: "0", text: visible(row.prompt ?? "") }), responseOf(row));
  }

  function legend() {
    const place = byId("legend");
    if (!view) return place.replaceChildren("no numbers per token were written down");
    const ramp = make("span", { class: "ramp" });
    const [from, to] = view.signed ? ["neg", "pos"] : ["rare", "rare"];
    ramp.style.background = `linear-gradient(to right, rgb(var(--${from}) / ${view.signed ? 0.62 : 0}), rgb(var(--${from}) / 0) ${view.signed ? "50%" : "0"}, rgb(var(--${to}) / ${view.signed ? 0 : 0}) ${view.signed ? "50%" : "0"}, rgb(var(--${to}) / 0.62))`;
    place.replaceChildren(`${view.low} ${view.signed ? number(-view.most) : "0"}`, ramp, `${view.signed ? "+" : ""}${number(view.most)} ${view.high}`);
  }

  function cards() {
    chosen = null;
    byId("inspector").hidden = true;
    byId("cards").replaceChildren(...group.rows.map(cardOf));
  }

  buttons(byId("steps"), data.samples, (item) => `step ${item.step.toLocaleString("en")}`, (item) => item === group, (item) => {
    group = item;
    cards();
  });
  buttons(byId("views"), views, (item) => item.name, (item) => item === view, (item) => {
    view = item;
    legend();
    document.querySelectorAll("#cards .t").forEach((span) => span.row && paint(span));
  });
  legend();
  cards();
})();
