// The Voice page: its parts put together, and its buttons and keys.

import { Devices } from "./devices.js";
import { Microphone } from "./mic.js";
import { Page } from "./page.js";
import { Player } from "./player.js";
import { insecureReason, micReason } from "./reasons.js";
import { Recording, transcript } from "./recording.js";
import { readSettings } from "./settings.js";
import { Socket } from "./socket.js";
import { Talk } from "./talk.js";

const $ = (id) => document.getElementById(id);
const { model, rateHz, stages, playerWorklet, micWorklet } = document.body.dataset;
const on = (id, event, handler) => $(id)?.addEventListener(event, handler);
const TYPED_IN = "textarea, input, select";

const settings = readSettings();
const colours = new Map(stages.split(",").map((name, number) => [name, number % 6]));
const view = new Page(colours);
const speaks = Number(rateHz) > 0;
const player = speaks ? new Player(playerWorklet, Number(rateHz)) : null;
const mic = new Microphone(micWorklet);
const socket = new Socket(() => talk.address());
let wake = null;

setUpChoices();
const recording = new Recording();
const talk = new Talk({ model, socket, player, mic, recording, view, settings });
const devices = new Devices(settings, onDevice);
view.onState = showButtons;
showButtons();
socket.connect();
if (!window.isSecureContext) view.showReason(insecureReason(), "device");

function setUpChoices() {
  const offered = [...$("voice").options].map(({ value }) => value);
  if (settings.voice === null || !offered.includes(settings.voice)) settings.voice = offered[0] ?? "";
  if (!window.isSecureContext) settings.voice = "";
  $("voice").value = settings.voice;
  $("walkie").checked = settings.walkie;
}

/** Sound may start only while the browser handles a key or a click: called from those alone. */
async function openPlayer() {
  if (!player || !settings.voice) return;
  try {
    if (settings.output) player.sinkId = settings.output;
    await player.open();
  } catch (error) {
    talk.fail(micReason(error));
  }
}

async function openMic() {
  openPlayer();
  view.showReason(null, "device");
  try {
    const opened = mic.open(settings.input);
    changed();
    if (!(await opened)) return;
  } catch (error) {
    talk.fail(micReason(error));
    return;
  }
  devices.refresh();
  keepAwake();
  changed();
}

function closeMic() {
  talk.speech.release();
  mic.close();
}

mic.addEventListener("closed", () => {
  wake?.release();
  wake = null;
  changed();
});

/** The screen stays on while the microphone does. */
async function keepAwake() {
  try {
    wake = await navigator.wakeLock?.request("screen");
  } catch {
    wake = null; // not allowed on low battery, or in a background tab; the talk goes on without
  }
}

async function onDevice(kind, deviceId) {
  settings[kind] = deviceId;
  settings.save();
  if (kind === "input" && mic.on) await openMic();
  if (kind === "output") await player?.setSink(deviceId).catch((error) => talk.fail(micReason(error)));
}

function changed() {
  talk.refresh();
  showButtons();
}

function showButtons() {
  const answering = ["thinking", "speaking"].includes(view.state);
  $("stop").hidden = !answering;
  $("mute").hidden = !mic.on || settings.walkie;
  $("mute").setAttribute("aria-pressed", String(mic.muted));
  $("mic-off").hidden = !mic.on;
  $("talk-button").setAttribute("aria-pressed", String(mic.on && !settings.walkie));
  const labels = settings.walkie ? ["Hold to talk", "Hold to talk"] : ["Talk", "End talk"];
  $("talk-label").textContent = labels[mic.on ? 1 : 0] + (view.state === "ended" ? " again" : "");
  document.body.classList.toggle("mic-on", mic.on);
  document.body.classList.toggle("walkie", settings.walkie);
}

// Meters: levels are drawn only while there is something to draw.

function draw() {
  $("mic-meter").style.setProperty("--level", String(loudness(mic.rms)));
  $("sound-meter").style.setProperty("--level", String(loudness(player?.rms ?? 0)));
  $("talk-button").style.setProperty("--level", String(loudness(player?.playing ? player.rms : mic.rms)));
  requestAnimationFrame(draw);
}
requestAnimationFrame(draw);

/** 0 to 1 over 50 dB. */
function loudness(rms) {
  return rms > 0 ? Math.max(0, Math.min(1, 1 + (20 * Math.log10(rms)) / 50)) : 0;
}

// Talking

function onPress() {
  talk.restartIfEnded();
  if (!mic.on && !mic.opening) openMic();
  talk.speech.press();
}

on("talk-button", "pointerdown", (event) => {
  if (!settings.walkie || event.button !== 0) return;
  event.target.setPointerCapture?.(event.pointerId);
  onPress();
});
for (const end of ["pointerup", "pointercancel"]) {
  on("talk-button", end, () => {
    mic.wake();
    talk.speech.release();
  });
}
on("talk-button", "click", () => {
  if (settings.walkie) return;
  if (mic.on || mic.opening) return closeMic();
  talk.restartIfEnded();
  openMic();
});
on("talk-button", "contextmenu", (event) => settings.walkie && event.preventDefault());

function isTalkKey(event) {
  return event.code === "Space" && settings.walkie && !event.target.closest?.(TYPED_IN) && !otherButton(event.target);
}

function otherButton(target) {
  const button = target.closest?.("button, a, summary");
  return button && button.id !== "talk-button";
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("stop").hidden) talk.stop();
  if (!isTalkKey(event)) return;
  event.preventDefault();
  if (!event.repeat) onPress();
});
document.addEventListener("keyup", (event) => {
  if (isTalkKey(event)) event.preventDefault();
  if (event.code === "Space") talk.speech.release();
});
window.addEventListener("pagehide", ({ persisted }) => persisted || socket.leave());
window.addEventListener("blur", () => talk.speech.release());
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && mic.on) keepAwake();
});

on("mute", "click", () => {
  mic.muted = !mic.muted;
  changed();
});
on("mic-off", "click", closeMic);
on("stop", "click", () => talk.stop());

// Choices

on("voice", "change", ({ target }) => {
  settings.voice = target.value;
  settings.save();
  if (settings.voice) openPlayer();
  talk.configure();
});

function setWalkie(walkie) {
  settings.walkie = walkie;
  $("walkie").checked = walkie;
  settings.save();
  talk.speech.release();
  talk.configure();
  changed();
  if (walkie && mic.on) $("talk-button").focus();
}

on("walkie", "change", ({ target }) => setWalkie(target.checked));
on("reasons", "click", ({ target }) => {
  if (!target.matches(".walkie-offer")) return;
  setWalkie(true);
  view.showReason(null, "echo");
});

// Typing

function ask(text) {
  openPlayer();
  talk.ask(text);
}

on("composer", "submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text) return;
  $("message").value = "";
  ask(text);
});
on("message", "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
on("empty", "click", ({ target }) => {
  if (target.matches(".example")) ask(target.textContent);
});
on("clear", "click", () => {
  talk.restart();
  $("message").focus();
});

// Keeping it

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

on("download", "click", async () => {
  if (talk.turns.length === 0) return view.showReason({ title: "Nothing to save yet", text: "Say or type something first." }, "download");
  const name = `fleet-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}`;
  download(transcript(talk.turns, model, talk.session), `${name}.json`);
  if (!recording.empty) download(await recording.wav(), `${name}.wav`);
});

window.fleetVoice = { talk, player, mic, socket, recording, view };
