// Starts the page: the key, the models, the views, and the form that all views share.

import { ApiError, hasKey, models, setKey } from "./api.js";
import { chat, newChat } from "./chat.js";
import { compare } from "./compare.js";
import { $, make } from "./dom.js";
import { watchLoad } from "./load.js";
import { offer } from "./settings.js";
import { watchTokens } from "./tokens.js";

const VIEWS = ["chat", "compare", "load"];
let offered = [];
let running = null;

const chosen = () => offered.find((one) => one.id === $("model").value);

// ---------------------------------------------------------------------------------------------------------- views

function show(view) {
  document.body.dataset.view = view;
  for (const name of VIEWS) {
    const tab = $(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
  }
  $("chat").hidden = view === "compare";
  $("compare").hidden = view !== "compare";
  $("new-chat").hidden = view !== "chat";
  $("send").textContent = view === "compare" ? "Compare" : "Send";
}

function watchTabs() {
  for (const name of VIEWS) {
    $(`tab-${name}`).addEventListener("click", () => show(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const shown = VIEWS.filter((one) => $(`tab-${one}`).offsetParent !== null);
      const next = shown[(shown.indexOf(name) + step + shown.length) % shown.length];
      show(next);
      $(`tab-${next}`).focus();
    });
  }
}

// ----------------------------------------------------------------------------------------------------------- keys

// Asks for a key until one is given.
function askKey(reason) {
  const dialog = $("key");
  $("key-reason").textContent = reason;
  $("key-value").value = "";
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener(
      "close",
      () => {
        const given = $("key-value").value.trim();
        $("key-value").value = "";
        if (given) setKey(given);
        done(Boolean(given));
      },
      { once: true },
    );
  });
}

async function load() {
  for (;;) {
    try {
      offered = await models();
      break;
    } catch (error) {
      if (error.status === 401) {
        $("key-change").hidden = false;
        await askKey(hasKey() ? "The server does not know this key." : "This server asks for a key.");
      } else {
        problem(error);
        await new Promise((done) => setTimeout(done, 2000));
      }
    }
  }
  problem(null);
  $("model").replaceChildren(...offered.map((one) => make("option", "", { value: one.id }, one.id)));
  $("model").disabled = offered.length < 2;
  offer(chosen());
}

// ------------------------------------------------------------------------------------------------------- messages

function problem(error) {
  $("problem").hidden = error === null;
  $("problem").textContent = error === null ? "" : error.message.charAt(0).toUpperCase() + error.message.slice(1);
}

function busy(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  $("new-chat").disabled = controller !== null;
}

async function send() {
  const text = $("message").value.trim();
  if (running || !text || !offered.length || !$("composer").reportValidity()) return;
  const controller = new AbortController();
  busy(controller);
  problem(null);
  $("message").value = "";
  fit();
  try {
    if (document.body.dataset.view === "compare") await compare(text, chosen(), controller.signal);
    else await chat(text, controller.signal);
  } catch (error) {
    if (!$("message").value) $("message").value = text; // not lost
    problem(error);
    fit();
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) await load();
  } finally {
    busy(null);
  }
}

// The field is as high as its text, up to a bound that the style sheet sets.
function fit() {
  const field = $("message");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function watchForm() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("message").addEventListener("input", fit);
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("new-chat").addEventListener("click", () => {
    newChat();
    $("message").focus();
  });
  $("model").addEventListener("change", () => offer(chosen()));
  $("key-change").addEventListener("click", async () => {
    if (await askKey("Give another key.")) await load();
  });
  for (const one of document.querySelectorAll("[data-suggestion]")) {
    one.addEventListener("click", () => {
      $("message").value = one.dataset.suggestion;
      send();
    });
  }
}

watchTabs();
watchForm();
watchTokens();
show("chat");
await load();
if (!$("key").open) $("message").focus({ preventScroll: true });
watchLoad(() => $("model").value);
