// The panel Session: its fields, what the server serves of them, and what it refuses.

import { parseTools, VAD_FIELDS } from "./settings.js";

const $ = (id) => document.getElementById(id);
const TURNS = { semantic_vad: "turns end by your words", server_vad: "turns end after silence", push: "push to talk", none: "turns end by a button" };

export class SessionPanel {
  /** @param {object} settings @param {(name: string) => void} onChange called with the id of the field that has changed */
  constructor(settings, onChange) {
    Object.assign(this, { settings, onChange });
    const offered = [...$("voice").options].map(({ value }) => value);
    if (settings.voice === null || !offered.includes(settings.voice)) settings.voice = offered[0];
    if (!window.isSecureContext) settings.voice = "";
    if ($("tools").disabled) settings.tools = "";
    this.show();
    $("session").addEventListener("change", ({ target }) => this.onInput(target));
    $("session").addEventListener("submit", (event) => event.preventDefault());
  }

  show() {
    const { settings } = this;
    for (const name of ["voice", "turns", "eagerness", "instructions", "tools"]) $(name).value = settings[name];
    for (const name of VAD_FIELDS) if (name in settings.vad) $(name).value = settings.vad[name] ?? "";
    for (const part of document.querySelectorAll("[data-turns]")) part.hidden = part.dataset.turns !== settings.turns;
    const parts = [settings.voice || "text only", TURNS[settings.turns]];
    if (settings.instructions) parts.push("instructions");
    const count = parseTools(settings.tools).length;
    if (count) parts.push(`${count} function${count === 1 ? "" : "s"}`);
    $("session-line").textContent = parts.join(" · ");
  }

  onInput({ id, value }) {
    const { settings } = this;
    if (id === "tools" && !this.checkTools(value)) return;
    if (VAD_FIELDS.includes(id)) settings.vad = { ...settings.vad, [id]: value === "" ? null : Number(value) };
    else settings[id] = value;
    settings.save();
    this.show();
    this.onChange(id);
  }

  checkTools(text) {
    try {
      parseTools(text);
      return true;
    } catch (error) {
      this.refuse("session.tools", error.message);
      return false;
    }
  }

  /** @param {string|null} param of an error @param {string} message @returns {boolean} false if no field of the panel has this name */
  refuse(param, message) {
    const fields = [...document.querySelectorAll("#session [data-param]")].filter((field) => param?.startsWith(field.dataset.param));
    const field = fields.sort((a, b) => a.dataset.param.length - b.dataset.param.length).at(-1);
    if (!field) return false;
    field.querySelector(".wrong").textContent = message;
    field.querySelector("input, select, textarea").setAttribute("aria-invalid", "true");
    $("session-fold").open = true;
    return true;
  }

  clearRefusals() {
    for (const wrong of document.querySelectorAll("#session .wrong")) wrong.textContent = "";
    for (const field of document.querySelectorAll("#session [aria-invalid]")) field.removeAttribute("aria-invalid");
  }

  /** Show the settings that the server holds, except in a field that it refused or that is being edited. */
  onUpdated({ audio }) {
    const detection = audio?.input?.turn_detection;
    if (detection?.type !== "server_vad") return;
    for (const name of VAD_FIELDS) {
      const field = $(name);
      if (name in detection && field !== document.activeElement && !field.hasAttribute("aria-invalid")) field.value = detection[name] ?? "";
    }
  }
}
