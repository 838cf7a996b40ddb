/* Navigation: shows the current entry in the sidebar, marks pages that were read to their
   end, lets Next follow a path chosen on the first page, and handles the keys /, left and
   right. Pages also work without this script, and the script without storage. */
"use strict";
(() => {
  const stored = {
    get: (name) => {
      try { return JSON.parse(localStorage.getItem(name)); } catch { return null; }
    },
    set: (name, value) => {
      try { localStorage.setItem(name, JSON.stringify(value)); } catch { /* private */ }
    },
  };
  const addressOf = (link) => new URL(link.href, location).pathname;
  const here = location.pathname;
  const sidebar = document.querySelector(".bd-sidebar-primary");

  function showTheCurrentEntry() {
    const current = sidebar?.querySelector(".bd-links li.current.active > a");
    current?.setAttribute("aria-current", "page");
    if (!current?.checkVisibility()) return;
    const list = current.closest(".sidebar-primary-item");
    const [box, entry] = [list, current].map((part) => part.getBoundingClientRect());
    if (entry.top < box.top || entry.bottom > box.bottom)
      list.scrollTop += (entry.top + entry.bottom - box.top - box.bottom) / 2;
  }

  function markReadPages() {
    const read = new Set(stored.get("read") ?? []);
    for (const link of sidebar?.querySelectorAll(".bd-links a") ?? [])
      link.classList.toggle("read", read.has(addressOf(link)));
    const end = document.querySelector("section#recap, section#next");
    if (end) new IntersectionObserver(([seen], observer) => {
      if (!seen.isIntersecting) return;
      observer.disconnect();
      stored.set("read", [...read.add(here)]);
    }).observe(end);
  }

  /* Add a button that selects these links as the path to follow. */
  function offer(name, place, links) {
    const button = document.createElement("button");
    const path = { name, pages: links.map((link) => [addressOf(link), link.textContent]) };
    const isChosen = () => stored.get("path")?.name === name;
    const update = () => button.setAttribute("aria-pressed", isChosen());
    button.className = "follow";
    button.textContent = `Guide me along “${name}”`;
    button.title = "The link at the foot of each page then leads to the next page of this list.";
    button.addEventListener("click", () => {
      stored.set("path", isChosen() ? null : path);
      document.dispatchEvent(new Event("path"));
    });
    document.addEventListener("path", update);
    update();
    place.append(" ", button);
  }

  function offerPaths() {
    for (const list of document.querySelectorAll(".path ul")) {
      const name = list.closest("section").querySelector("h2, h3").firstChild.textContent;
      const place = list.parentElement.appendChild(document.createElement("p"));
      offer(name, place, [...list.querySelectorAll("li > p > a:first-of-type")]);
    }
  }

  function followThePath() {
    const path = stored.get("path");
    const at = path?.pages.findIndex(([page]) => page === here) ?? -1;
    const next = path?.pages[at + 1];
    const link = document.querySelector("a.right-next");
    if (at < 0 || !next || !link || addressOf(link) === next[0]) return;
    link.href = next[0];
    link.title = `next on the path “${path.name}”`;
    link.querySelector(".prev-next-subtitle").textContent = link.title;
    link.querySelector(".prev-next-title").textContent = next[1];
  }

  document.addEventListener("keydown", (event) => {
    const modified = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey;
    if (modified || event.defaultPrevented || document.activeElement !== document.body) return;
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "/") {
      event.preventDefault();
      document.querySelector(".search-button__button")?.click();
    }
    const link = { ArrowLeft: "a.left-prev", ArrowRight: "a.right-next" }[event.key];
    if (link) document.querySelector(link)?.click();
  });
  markReadPages();
  offerPaths();
  followThePath();
  window.addEventListener("load", showTheCurrentEntry);
})();
