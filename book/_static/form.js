/* Shared by the explorer and the calculator: reading numbers, bars and table rows, and a form
   whose fields are stored in the address. Only Form.connect needs a page. */
"use strict";
(() => {
  const COLORS = "#696eef #a899e3 #aefaea #4ccd9d #fcee28 #f69c1d #cc5917 #977587".split(" ");

  const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
  const productOf = (at, names) => product(names.map((name) => at[name]));
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const english = (n) => Math.round(n).toLocaleString("en");
  const three = (n) => n.toLocaleString("en", { maximumSignificantDigits: 3 });
  const percent = (part, all) => `${all ? Math.round(100 * part / all) : 0} %`;

  const UNITS = ["bytes", "kB", "MB", "GB", "TB", "PB"];
  function bytes(n) {
    const power = n < 1000 ? 0 : Math.min(5, Math.floor(Math.log10(n) / 3));
    return `${three(n / 1000 ** power)} ${UNITS[power]}`;
  }

  function check(valid, field, ...sentences) {
    if (!valid) throw Object.assign(new Error(sentences.join(" ")), { field });
  }

  /* Return the integers from 1 to `largest` in an object of texts, for each name in `labels`. */
  function wholeNumbers(texts, labels, largest) {
    const numbers = {};
    for (const [name, label] of Object.entries(labels)) {
      const text = texts[name].trim().replace(/(?<=\d)[ ,_](?=\d{3}(?!\d))/g, "");
      check(/^\d+$/.test(text), name, `${label}: cannot read "${text}" as a whole number.`,
        "Enter digits only, such as 8.");
      numbers[name] = Number(text);
      check(numbers[name] > 0, name, `${label} is 0. Enter 1 or more.`);
      check(numbers[name] <= largest, name, `${label} is too large.`,
        `Enter at most ${english(largest)}.`);
    }
    return numbers;
  }

  /* Return the first of the rules [size, divisors, reason] that a case breaks. */
  const broken = (at, rules) => rules.find(([size, by]) => at[size] % productOf(at, by) !== 0);

  const divisor = (a, b) => (b ? divisor(b, a % b) : a);

  /* Reject a case that breaks a rule; suggest a size, at most `largest`, that satisfies all. */
  function checkRules(at, rules, labels, largest) {
    const [size, by, reason] = broken(at, rules) ?? [];
    if (!size) return;
    const all = rules.filter(([other]) => other === size).map(([, names]) => productOf(at, names))
      .reduce((a, b) => a / divisor(a, b) * b);
    const next = Math.ceil(at[size] / all) * all;
    const words = by.map((name) => labels[name]);
    check(false, size, `${labels[size]} is ${english(at[size])}, which ${words.join(" × ")} =`,
      `${english(productOf(at, by))} does not divide. ${reason}`,
      next <= largest ? `Try ${english(next)}, or change` : "Change", `${words.join(" or ")}.`);
  }

  /* Return a bar of parts [name, size, colour]; the rest of `all` stays empty. */
  function bar(parts, all, label) {
    const spans = parts.map(([, size, color], i) => {
      const width = all ? 100 * size / all : 0;
      return `<span style="width: ${width}%; background: ${COLORS[color]}">${
        width > 4 ? i + 1 : ""}</span>`;
    });
    const words = parts.map(([name, size]) => `${name} ${percent(size, all)}`).join(", ");
    return `<div class="bar" role="img" aria-label="${label}: ${words}">${spans.join("")}</div>`;
  }

  const row = (head, ...cells) => `<tr><th scope="row">${head}</th>${
    cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`;
  const keyed = ([name, , color], i) =>
    `<span style="background: ${COLORS[color]}">${i + 1}</span> ${name}`;

  /* Return a bar and table rows with a total, from sizes by name; `first` is the first colour. */
  function shares(sizes, first, label) {
    const all = sum(Object.values(sizes));
    const parts = Object.entries(sizes).map(([name, size], i) => [name, size, i + first]);
    const rows = parts.map((entry, i) =>
      row(keyed(entry, i), english(entry[1]), percent(entry[1], all)));
    return [bar(parts, all, label), [...rows, row("Total", english(all), percent(all, all))].join("")];
  }

  /* Connect the form in `root` with the address, which stores the fields called `names`. For an
     unknown value of a select in `choices`, select the first option and show a notice.
     show(texts) fills the page. If it throws an error of `check`, the answer is the message and
     the result becomes inert. tidy(texts) returns fields to rewrite after an address has set
     them. `part` finds an element by its class, `typed` returns the fields, `take` sets some,
     as do buttons with data-sizes, and `start` reads the address. */
  function connect(root, names, choices, show, tidy = () => ({})) {
    const form = root.querySelector("form");
    const field = form.elements;
    const part = (name) => root.querySelector(`.${name}`);
    const typed = () => Object.fromEntries(names.map((name) => [name, field[name].value]));
    const notice = Object.assign(document.createElement("p"), { role: "status" });
    let typing = false;
    form.after(notice);

    function render() {
      for (const input of form) input.removeAttribute("aria-invalid");
      part("result").inert = false;
      try {
        show(typed());
      } catch (error) {
        if (!error.field) throw error;
        field[error.field].setAttribute("aria-invalid", true);
        part("answer").textContent = error.message;
        part("result").inert = true;
      }
    }

    function restore() {
      form.reset();
      const query = new URLSearchParams(location.search);
      for (const name of names) if (query.has(name)) field[name].value = query.get(name);
      const invalid = choices.filter((name) => !field[name].value);
      for (const name of invalid) field[name].selectedIndex = 0;
      notice.textContent = invalid.map((name) => `The address has ${name}="${query.get(name)}",`
        + ` which is not an option here. Shown: ${field[name].value}.`).join(" ");
      set(tidy(typed()));
      render();
    }

    const plain = (text) => encodeURIComponent(text.replace(/["']/g, "").replace(/\s*,\s*/g, ","))
      .replace(/%(2C|3D)/g, decodeURIComponent).replaceAll("%20", "+");

    function record(change) {
      const pairs = Object.entries(typed()).map(([name, text]) => `${name}=${plain(text)}`);
      history[change](null, "", `?${pairs.join("&")}`);
      notice.textContent = "";
      render();
    }

    function set(values) {
      for (const [name, value] of Object.entries(values)) field[name].value = value;
    }

    function take(values) {
      set(values);
      record("pushState");
    }

    function start() {
      form.addEventListener("input", () => {
        record(typing ? "replaceState" : "pushState");
        typing = true; // until the field loses focus: Back undoes the full edit
      });
      form.addEventListener("change", () => { typing = false; });
      form.addEventListener("click", ({ target: { dataset } }) => {
        if (dataset.sizes) take(Object.fromEntries(new URLSearchParams(dataset.sizes)));
      });
      addEventListener("popstate", restore);
      root.hidden = false;
      document.querySelector("#explorer-off").remove();
      restore();
    }

    return { part, form, field, typed, take, start };
  }

  globalThis.Form = { COLORS, product, productOf, sum, english, three, percent, bytes, check,
    wholeNumbers, divisor, broken, checkRules, bar, row, keyed, shares, connect };
})();
