"use strict";
// The page works without this: links pick a bucket through :target. Here: filters, arrow keys, picking without a jump.
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const details = all(".detail");
  if (!details.length) return;
  root.classList.add("js");
  const rows = all(".buckets tbody tr");
  const cells = all(".map a.cell");
  const form = document.querySelector(".filters");
  const search = document.getElementById("search");
  const count = document.getElementById("count");
  const none = document.getElementById("none");

  function pick(id, look) {
    const detail = details.find((each) => each.id === id) || details[0];
    details.forEach((each) => each.classList.toggle("picked", each === detail));
    [...cells, ...rows].forEach((each) => {
      const same = each.dataset.id === detail.id;
      const link = each.matches("a") ? each : each.querySelector("a");
      each.classList.toggle("current", same);
      if (same) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
    if (!look) return;
    history.replaceState(null, "", "#" + detail.id);
    const { top } = detail.getBoundingClientRect();
    if (top < 0 || top > innerHeight - 260) detail.scrollIntoView();
  }

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = all("[data-filter]", form).filter((each) => each.value);
    const kept = new Set();
    for (const row of rows) {
      const keep = wanted.every((each) => row.dataset[each.dataset.filter] === each.value)
        && words.every((word) => row.dataset.search.includes(word));
      row.hidden = !keep;
      if (keep) kept.add(row.dataset.id);
    }
    for (const cell of cells) cell.classList.toggle("dim", !kept.has(cell.dataset.id));
    for (const map of all(".map")) map.classList.toggle("dim", !map.querySelector("a.cell:not(.dim)"));
    none.hidden = kept.size > 0;
    count.value = kept.size === rows.length ? rows.length + " buckets" : kept.size + " of " + rows.length + " buckets";
  }

  function clear() {
    form.reset();
    filter();
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.cell, .buckets tbody tr");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || String(getSelection())) return;
    event.preventDefault();
    pick(link.dataset.id, true);
  });

  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input[type=search], select");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape" && typing) {
      clear();
    } else if (STEPS[event.key] && event.target.matches("a.cell")) {
      event.preventDefault();
      const [down, right] = STEPS[event.key];
      const grid = all("tbody tr", event.target.closest("table")).map((row) => all("td", row));
      let y = grid.findIndex((row) => row.includes(event.target.parentElement));
      let x = grid[y].indexOf(event.target.parentElement);
      do {
        y += down;
        x += right;
      } while (grid[y] && grid[y][x] && !grid[y][x].firstElementChild);
      if (grid[y] && grid[y][x]) grid[y][x].firstElementChild.focus();
    }
  });

  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  document.getElementById("clear").addEventListener("click", clear);
  addEventListener("hashchange", () => pick(location.hash.slice(1), false));
  pick(location.hash.slice(1), false);
  filter();
})();
