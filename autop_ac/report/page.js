"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.querySelector("main");
  const colour = (holder) => `var(--${holder.replace(/ /g, "-")})`;

  // small helpers: elements, numbers

  const SVG = "http://www.w3.org/2000/svg";
  const set = (node, attributes, children) => {
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    for (const child of [].concat(children ?? [])) node.append(child);
    return node;
  };
  const el = (tag, attributes, children) => set(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, children) => set(document.createElementNS(SVG, tag), attributes, children);

  const bytes = (count) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let i = 0;
    while (Math.abs(count) >= 1024 && i < units.length - 1) { count /= 1024; i += 1; }
    return i ? `${count.toFixed(2)} ${units[i]}` : `${count} B`;
  };
  const seconds = (s) => (s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(2)} ms` : `${(s * 1e6).toFixed(2)} us`);
  const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}%` : "");

  // round numbers for an axis from 0 to at least `most`, in powers of `base`
  const ticks = (most, base) => {
    if (!(most > 0)) return [0];
    const rough = most / 4;
    const unit = base ** Math.floor(Math.log(rough) / Math.log(base));
    const steps = base === 1024 ? [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 512, 1024] : [1, 2, 2.5, 5, 10];
    const step = unit * steps.find((s) => unit * s >= rough);
    const found = [];
    for (let t = 0; t < most + step * 0.999; t += step) found.push(t);
    return found;
  };
  const short = (count) => bytes(count).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 ");

  // a dotted name, which may go on in the next line behind a dot and nowhere else
  const path = (name) => el("span", { class: "path" }, name.split(/(?<=\.)/).flatMap((part, i) => [...(i ? [el("wbr")] : []), el("span", {}, part)]));
  const times = (count) => el("span", { class: "soft" }, count > 1 ? `\u00a0x\u00a0${count}` : "");
  const glued = (text) => text.replace(/(\d) (?=[A-Za-z]+\b)/g, "$1\u00a0"); // no unit without its number

  // as wide as there is room, so that letters keep their size
  const width = (node, most) => {
    const style = getComputedStyle(node);
    return Math.max(300, Math.min(most, node.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)));
  };
  const drawn = [];
  const draw = (holder, most, make) => {
    const fit = () => holder.replaceChildren(...[].concat(make(width(holder.closest("section"), most))));
    drawn.push(fit);
  };

  // head and tiles

  const estimate = data.estimate;
  const report = data.report;
  main.append(el("header", {}, [
    el("h1", {}, "Memory and time of one training step"),
    el("span", { class: `pill ${estimate.fits ? "fits" : "over"}`, id: "verdict" },
      `${estimate.fits ? "fits" : "does not fit"} ${estimate.device}`),
    el("span", { class: "soft", id: "counted" }, estimate.optimizer === null ? "optimizer state not counted" : `state of ${estimate.optimizer} counted`),
    el("span", { class: "soft" }, [
      data.mesh ? `mesh ${data.mesh.axes.map((a, i) => `${a}=${data.mesh.shape[i]}`).join(" x ")}, ` : "one device, ",
      `${bytes(estimate.device_bytes)} each, ${bytes(estimate.usable_bytes)} of them usable`,
    ].join("")),
  ]));
  const tile = (label, value, more) => el("div", { class: "tile" }, [
    el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "more" }, more.map((text) => el("div", {}, glued(text)))),
  ]);
  const how = report.budget_bytes !== null ? `a budget of ${bytes(report.budget_bytes)}`
    : report.stage_bytes !== null ? `stages of ${bytes(report.stage_bytes)}` : data.enabled ? "no stages" : "off";
  const time = estimate.time;
  main.append(el("div", { class: "tiles" }, [
    tile("predicted peak", bytes(estimate.peak_bytes), [`without AC ${bytes(report.peak_without_ac_bytes)}`]),
    tile("saved for backward", bytes(report.kept_bytes), [`without AC ${bytes(report.kept_without_ac_bytes)}`, how]),
    tile("predicted step", seconds(estimate.step_s), [`without AC ${seconds(data.step_without_ac_s)}`, `computation ${seconds(time.compute_s)}`]),
    tile("recomputation", seconds(report.recompute_s), [
      `operators ${seconds(time.recompute_s - time.recompute_communication_s)}`, `collectives ${seconds(time.recompute_communication_s)}`]),
    tile("waiting for collectives", seconds(time.exposed_s), [`of ${seconds(time.communication_s)} that they take`]),
  ]));

  // live bytes over forward and backward

  const stack = (memory, W) => {
    const [H, L, R, T, B] = [W < 600 ? 280 : 380, 66, 10, 34, 46];
    const names = Object.keys(memory.holders);
    const totals = memory.steps.map((_, i) => names.reduce((sum, n) => sum + memory.holders[n][i], 0));
    const measured = memory.measured || [];
    const top = ticks(Math.max(...totals, ...measured.map((m) => m[1])) * 1.06, 1024);
    const most = top[top.length - 1];
    const x = (step) => L + ((W - L - R) * step) / Math.max(memory.count, 1);
    const y = (b) => T + (H - T - B) * (1 - b / most);
    const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "live bytes over forward and backward" });
    for (const t of top) {
      root.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: y(t), y2: y(t) }));
      root.append(svg("text", { x: L - 8, y: y(t) + 4, "text-anchor": "end" }, short(t)));
    }
    // each shown step reaches to the next one
    const edges = memory.steps.map((s, i) => [x(i ? s : 0), x(i + 1 < memory.steps.length ? memory.steps[i + 1] : memory.count)]);
    let below = memory.steps.map(() => 0);
    for (const name of names) {
      const above = below.map((b, i) => b + memory.holders[name][i]);
      const path = [];
      above.forEach((a, i) => path.push(`${edges[i][0]},${y(a)}`, `${edges[i][1]},${y(a)}`));
      for (let i = below.length - 1; i >= 0; i -= 1) path.push(`${edges[i][1]},${y(below[i])}`, `${edges[i][0]},${y(below[i])}`);
      root.append(svg("polygon", { points: path.join(" "), style: `fill: ${colour(name)}`, "data-holder": name }));
      below = above;
    }
    const split = x(memory.forward_steps);
    root.append(svg("line", { class: "axis", x1: split, x2: split, y1: T - 8, y2: H - B + 16, "stroke-dasharray": "4 3" }));
    const label = (from, to, text) => to - from > 60 && root.append(
      svg("text", { x: (from + to) / 2, y: H - B + 36, "text-anchor": "middle" }, text));
    label(L, split, "forward");
    label(split, W - R, "backward");
    // under the axis: what is computed again
    memory.phase.forEach((phase, i) => {
      const fill = phase === "recompute" ? colour("recomputed") : phase === "forward" ? colour("inputs") : colour("parameters");
      root.append(svg("rect", { x: edges[i][0], width: Math.max(edges[i][1] - edges[i][0], 0.5), y: H - B + 7, height: 7, style: `fill: ${fill}` }));
    });
    if (measured.length) {
      root.append(svg("polyline", {
        points: measured.map((m) => `${x(m[0])},${y(m[1])}`).join(" "), id: "measured",
        style: "fill: none; stroke: var(--ink); stroke-width: 1.4",
      }));
    }
    if (estimate.usable_bytes <= most) {
      const at = y(estimate.usable_bytes);
      root.append(svg("line", { x1: L, x2: W - R, y1: at, y2: at, style: "stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 6 4" }));
      root.append(svg("text", { x: W - R - 4, y: at - 5, "text-anchor": "end", class: "halo", style: "fill: var(--bad)" }, `usable ${bytes(estimate.usable_bytes)}`));
    }
    if (memory.peak >= 0) {
      const px = (edges[memory.peak][0] + edges[memory.peak][1]) / 2;
      const py = y(totals[memory.peak]);
      const anchor = px > W - 80 ? "end" : px < L + 80 ? "start" : "middle";
      root.append(svg("circle", { cx: px, cy: py, r: 4.5, style: "fill: var(--card); stroke: var(--ink); stroke-width: 2", id: "peak" }));
      root.append(svg("text", { x: px, y: py - 10, "text-anchor": anchor, class: "strong halo" }, `peak ${bytes(totals[memory.peak])}`));
    }
    const cursor = root.appendChild(svg("line", { class: "cursor", y1: T, y2: H - B, visibility: "hidden" }));
    const tip = el("div", { class: "tip" });
    const chart = el("div", { class: "chart" }, [root, tip]);
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * W;
      const i = edges.findIndex((e) => at >= e[0] && at < e[1]);
      if (i < 0) { tip.style.display = "none"; cursor.setAttribute("visibility", "hidden"); return; }
      set(cursor, { x1: at, x2: at, visibility: "visible" });
      const rows = names.filter((n) => memory.holders[n][i]).reverse().map((n) => el("tr", {}, [
        el("td", {}, el("span", { class: "swatch", style: `background: ${colour(n)}` })),
        el("td", {}, n), el("td", { class: "num" }, bytes(memory.holders[n][i])),
      ]));
      tip.replaceChildren(el("div", { class: "path" }, memory.what[i]), el("strong", {}, bytes(totals[i])), el("table", {}, rows));
      tip.style.display = "block";
      const place = event.clientX - box.left;
      tip.style.left = place > box.width / 2 ? "" : `${place + 14}px`;
      tip.style.right = place > box.width / 2 ? `${box.width - place + 14}px` : "";
    });
    root.addEventListener("pointerleave", () => { tip.style.display = "none"; cursor.setAttribute("visibility", "hidden"); });
    const legend = names.slice().reverse().map((n) => el("span", {}, [el("i", { class: "swatch", style: `background: ${colour(n)}` }), n]));
    if (measured.length) legend.unshift(el("span", {}, [el("i", { class: "swatch", style: "background: var(--ink); height: 2px" }), "measured"]));
    return [chart, el("div", { class: "legend" }, legend)];
  };
  const live = el("section", { id: "memory" }, [
    el("h2", {}, "Live bytes of one device"),
    el("p", { class: "note" }, `At the peak runs ${estimate.peak_at}. The strip below shows what runs: forward in light grey, backward in dark grey, recomputation in orange.`),
    el("div", {}, []),
  ]);
  draw(live.lastChild, 1080, (W) => (data.memory.steps.length ? stack(data.memory, W) : ["nothing is computed"]));
  if (data.beside) live.append(el("pre", {}, data.beside));
  main.append(live);

  // who holds the peak, and the curve

  // a holder with all it holds, below it the modules of saved activations; what is tiny has no row
  const tiny = (count) => count * 1000 < estimate.peak_bytes;
  const held = [];
  let rest = 0;
  for (const holder of new Set(estimate.holdings.map((h) => h.holder))) {
    const own = estimate.holdings.filter((h) => h.holder === holder);
    const total = own.reduce((sum, h) => sum + h.bytes, 0);
    if (tiny(total)) { rest += total; continue; }
    held.push({ holder, bytes: total });
    if (holder === "saved activations") held.push(...own.filter((h) => !tiny(h.bytes)).map((h) => ({ ...h, inside: true })));
  }
  const longest = Math.max(...held.map((h) => h.bytes));
  const name = (h) => (h.inside
    ? [path(h.module || "(root)"), times(h.layers)]
    : [el("span", { class: "swatch", style: `background: ${colour(h.holder)}` }), ` ${h.holder}`]);
  const holdings = el("section", { id: "holdings" }, [
    el("h2", {}, "Who holds the peak"),
    el("table", {}, [
      el("thead", {}, el("tr", {}, [el("th"), el("th", { class: "num" }, "bytes"), el("th", { class: "num" }, "share"), el("th", { class: "bars" })])),
      el("tbody", {}, held.map((h) => el("tr", {}, [
        el("td", { class: h.inside ? "inside" : "" }, name(h)),
        el("td", { class: "num" }, bytes(h.bytes)), el("td", { class: "num" }, percent(h.bytes, estimate.peak_bytes)),
        el("td", { class: "bars" }, el("div", { class: "bar", style: `width: ${(80 * h.bytes) / longest}px; background: ${colour(h.holder)}; opacity: ${h.inside ? 0.55 : 1}` })),
      ]))),
    ]),
    el("p", { class: "note" }, rest ? `and others, ${bytes(rest)} together` : ""),
  ]);

  const curve = (points, W) => {
    const chosen = { peak: report.peak_bytes, time: report.recompute_s };
    const all = [...points, chosen];
    const [H, L, R, T, B] = [330, 62, 14, 20, 48];
    const low = Math.min(...all.map((p) => p.peak));
    const high = Math.max(...all.map((p) => p.peak));
    const pad = (high - low || high || 1) * 0.06;
    const up = ticks(Math.max(...all.map((p) => p.time)) * 1.05 || 1e-6, 10);
    const x = (b) => L + ((W - L - R) * (b - low + pad)) / (high - low + 2 * pad);
    const y = (t) => T + (H - T - B) * (1 - t / up[up.length - 1]);
    const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "peak against recompute time" });
    for (const t of up) {
      root.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: y(t), y2: y(t) }));
      root.append(svg("text", { x: L - 8, y: y(t) + 4, "text-anchor": "end" }, t ? seconds(t).replace(/\.?0+ /, " ") : "0"));
    }
    const marks = bytes(low) === bytes(high) ? [(low + high) / 2] : [low, (low + high) / 2, high];
    for (const b of marks) {
      root.append(svg("text", { x: x(b), y: H - B + 18, "text-anchor": b === high ? "end" : b === low ? "start" : "middle" }, bytes(Math.round(b))));
    }
    root.append(svg("text", { x: (L + W - R) / 2, y: H - 8, "text-anchor": "middle" }, "predicted peak"));
    root.append(svg("text", { x: L, y: T - 7 }, "recomputation in a step, gathers included"));
    root.append(svg("polyline", { points: points.map((p) => `${x(p.peak)},${y(p.time)}`).join(" "), style: "fill: none; stroke: var(--accent); stroke-width: 1.8" }));
    for (const p of points) {
      root.append(svg("circle", { cx: x(p.peak), cy: y(p.time), r: 3.4, style: "fill: var(--accent)" }, svg("title", {}, `${bytes(p.peak)}, ${seconds(p.time)}`)));
    }
    const [cx, cy] = [x(chosen.peak), y(chosen.time)];
    root.append(svg("path", { d: `M${cx - 6.5},${cy}L${cx},${cy - 6.5}L${cx + 6.5},${cy}L${cx},${cy + 6.5}Z`, id: "chosen", style: `fill: ${colour("recomputed")}; stroke: var(--card); stroke-width: 1.5` },
      svg("title", {}, `this plan: ${bytes(chosen.peak)}, ${seconds(chosen.time)}`)));
    const right = cx < (L + W) / 2;
    root.append(svg("text", { x: cx + (right ? 11 : -11), y: cy - 8, "text-anchor": right ? "start" : "end", class: "strong halo" }, "this plan"));
    return root;
  };
  const trade = el("section", { id: "pareto" }, [
    el("h2", {}, "Peak against recompute time"),
    el("p", { class: "note" }, "The least recomputation found for each peak, under the hints and rules in force. memory_budget picks a point of it."),
  ]);
  if (data.pareto.length) draw(trade.appendChild(el("div")), 560, (W) => curve(data.pareto, W));
  main.append(el("div", { class: "pair" }, data.pareto.length ? [holdings, trade] : [holdings]));

  // modules, as a tree that folds

  const tree = { name: "", children: new Map(), row: null };
  for (const row of report.rows) {
    let node = tree;
    for (const part of row.module ? row.module.split(".") : ["(root)"]) {
      if (!node.children.has(part)) node.children.set(part, { name: part, children: new Map(), row: null });
      node = node.children.get(part);
    }
    node.row = row;
  }
  const sums = (node) => {
    const own = node.row || { layers: 0, saved_bytes: 0, recomputed_bytes: 0 };
    node.saved = own.saved_bytes;
    node.again = own.recomputed_bytes;
    for (const child of node.children.values()) {
      sums(child);
      node.saved += child.saved;
      node.again += child.again;
    }
  };
  sums(tree);
  const most = Math.max(1, ...[...tree.children.values(), tree].map((n) => Math.max(n.saved, n.again)));
  const body = el("tbody");
  const add = (node, depth, parents) => {
    // a chain without rows of its own is one line
    let name = node.name || "(whole model)";
    while (depth && !node.row && node.children.size === 1) {
      [node] = node.children.values();
      name += `.${node.name}`;
    }
    const open = { value: depth < 2 };
    const toggle = node.children.size
      ? el("button", { class: "toggle", "aria-expanded": String(open.value), "aria-label": `fold ${name}` }, open.value ? "\u25be" : "\u25b8")
      : el("span", { class: "leaf" });
    if (!node.saved && !node.again) return;
    const reasons = node.row ? node.row.why.map((words) => el("div", {}, words)) : [];
    const bar = (count, holder) => el("div", { class: "bar", style: `width: ${count ? Math.max((70 * count) / most, 2) : 0}px; min-width: 0; background: ${colour(holder)}` });
    const line = el("tr", {}, [
      el("td", { style: `padding-left: ${depth * 16}px` }, [toggle, path(name), times(node.row ? node.row.layers : 1)]),
      el("td", { class: "num" }, node.saved ? bytes(node.saved) : ""), el("td", { class: "bars" }, bar(node.saved, "saved activations")),
      el("td", { class: "num" }, node.again ? bytes(node.again) : ""), el("td", { class: "bars" }, bar(node.again, "recomputed")),
      el("td", { class: "why" }, reasons),
    ]);
    body.append(line);
    const chain = [...parents, open];
    const refresh = () => { line.style.display = parents.every((p) => p.value) ? "" : "none"; };
    refresh();
    lines.push(refresh);
    if (node.children.size) {
      toggle.addEventListener("click", () => {
        open.value = !open.value;
        toggle.textContent = open.value ? "\u25be" : "\u25b8";
        toggle.setAttribute("aria-expanded", String(open.value));
        lines.forEach((f) => f());
      });
    }
    for (const child of node.children.values()) add(child, depth + 1, chain);
  };
  const lines = [];
  add(tree, 0, []);
  main.append(el("section", { id: "modules" }, [
    el("h2", {}, "Modules"),
    el("p", { class: "note" }, "Bytes of one device in order of execution, equal layers together; saved at the end of forward. A row with children counts all below it."),
    el("table", {}, [
      el("thead", {}, el("tr", {}, ["module", "saved", "", "recomputed", "", "why"].map((h, i) => el("th", { class: ["", "num", "bars", "num", "bars", "why"][i] }, h)))),
      body,
    ]),
  ]));

  // placements on the mesh

  if (data.mesh && data.mesh.parameters.length) {
    const mesh = data.mesh;
    const grid = el("div", { class: "mesh" });
    const caption = el("p", { class: "note" });
    const pick = (parameter, line) => {
      for (const other of document.querySelectorAll(".chosen")) other.classList.remove("chosen");
      if (line) line.classList.add("chosen");
      caption.replaceChildren(path(parameter.name), `: ${parameter.placements.map((p, i) => `${p} along ${mesh.axes[i]}`).join(", ")}. Devices of one colour hold the same part.`);
      if (!mesh.drawn) return;
      const columns = mesh.shape[mesh.shape.length - 1];
      grid.style.gridTemplateColumns = `repeat(${columns}, minmax(14px, 1fr))`;
      const count = mesh.shape.reduce((a, b) => a * b, 1);
      const parts = mesh.shape.reduce((a, n, i) => a * (parameter.placements[i].startsWith("S") || parameter.placements[i].startsWith("_S") ? n : 1), 1);
      grid.replaceChildren(...Array.from({ length: count }, (_, device) => {
        let rest = device;
        const at = mesh.shape.map(() => 0);
        for (let i = mesh.shape.length - 1; i >= 0; i -= 1) { at[i] = rest % mesh.shape[i]; rest = Math.floor(rest / mesh.shape[i]); }
        let part = 0;
        mesh.shape.forEach((n, i) => { if (/^_?S/.test(parameter.placements[i])) part = part * n + at[i]; });
        const hue = (215 + (300 * part) / parts) % 360;
        return el("div", { class: "cell", style: `background: hsl(${hue} 52% 43%)`, title: `device ${device} at ${mesh.axes.map((a, i) => `${a}=${at[i]}`).join(", ")}: part ${part + 1} of ${parts}` }, columns <= 32 ? String(part) : "");
      }));
    };
    const rows = mesh.parameters.map((p) => {
      const line = el("tr", { class: "pick", tabindex: "0" }, [
        el("td", {}, [path(p.name), times(p.count)]),
        ...p.placements.map((s) => el("td", {}, el("span", { class: `tag ${/^_?S/.test(s) ? "shard" : ""}` }, s))),
        el("td", { class: "num shape" }, `[${p.local.join(", ")}]`), el("td", { class: "num" }, bytes(p.bytes)),
      ]);
      line.addEventListener("click", () => pick(p, line));
      line.addEventListener("keydown", (event) => { if (event.key === "Enter") pick(p, line); });
      return line;
    });
    const axes = mesh.axes.map((a, i) => `${a}=${mesh.shape[i]}`);
    main.append(el("section", { id: "mesh" }, [
      el("h2", {}, "Placements on the mesh"),
      el("p", { class: "note" }, `S(0) is a shard of dim 0, R a replica. The search for placements counts nothing recomputed: its step of ${seconds(mesh.objective_s)} is within ${(100 * mesh.gap).toFixed(2)}% of the least. Pick a row to see which device holds what.`),
      el("div", { class: "columns" }, [
        el("div", { class: "scroll" }, el("table", {}, [
          el("thead", {}, el("tr", {}, ["parameter", ...axes, "local shape", "bytes"].map((h, i) => el("th", i > axes.length ? { class: i > axes.length + 1 ? "num" : "num shape" } : {}, h)))),
          el("tbody", {}, rows),
        ])),
        el("div", {}, [
          el("div", { class: "soft", style: "font-size: 12.5px" }, mesh.axes.length > 1 ? `rows ${axes.slice(0, -1).join(", ")}; columns ${axes[axes.length - 1]}` : axes[0]),
          grid, caption,
        ]),
      ]),
    ]));
    const first = Math.max(0, mesh.parameters.findIndex((p) => p.placements.some((s) => /^_?S/.test(s))));
    pick(mesh.parameters[first], rows[first]);
  }

  // notes, and hints that were set aside

  const remarks = [
    ...(estimate.advice ? [`room: ${estimate.advice}`] : []),
    ...report.notes.map((n) => `note: ${n}`),
    ...report.set_aside.map((a) => `set aside: ${a.reason}${a.source ? ` (${a.source})` : ""}, on ${a.values.length} values of ${a.module || "(root)"}; decided by ${a.decided_by}`),
  ];
  if (remarks.length) main.append(el("section", { id: "remarks" }, [el("h2", {}, "Remarks"), el("ul", {}, remarks.map((r) => el("li", {}, r)))]));
  const fit = () => drawn.forEach((make) => make());
  fit();
  window.addEventListener("resize", fit);
  document.documentElement.dataset.ready = "yes";
})();
