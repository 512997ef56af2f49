// The Voice page: connects its parts, buttons and keys.

import { Conversation } from "./conversation.js";
import { Devices } from "./devices.js";
import { Microphone } from "./mic.js";
import { PageView } from "./page.js";
import { Player } from "./player.js";
import { insecureReason, micReason } from "./reasons.js";
import { encodeTranscript, Recording } from "./recording.js";
import { readSettings } from "./settings.js";
import { Socket } from "./socket.js";

const $ = (id) => document.getElementById(id);
const { model, rateHz, stages, playerWorklet, micWorklet } = document.body.dataset;
const on = (id, event, handler) => $(id)?.addEventListener(event, handler);
const TYPED_IN = "textarea, input, select";

const settings = readSettings();
const colours = new Map(stages.split(",").map((name, number) => [name, number % 6]));
const view = new PageView(colours);
const speaks = Number(rateHz) > 0;
const player = speaks ? new Player(playerWorklet, Number(rateHz)) : null;
const mic = new Microphone(micWorklet);
const socket = new Socket(() => conversation.url);
let wake = null;

setUpChoices();
const recording = new Recording();
const conversation = new Conversation({ model, socket, player, mic, recording, view, settings });
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
  $("push-to-talk").checked = settings.pushToTalk;
}

/** Call it only from a key or a click: browsers start audio only then. */
async function openPlayer() {
  if (!player || !settings.voice) return;
  try {
    if (settings.output) player.sinkId = settings.output;
    await player.open();
  } catch (error) {
    conversation.showDeviceError(micReason(error));
  }
}

async function openMic() {
  openPlayer();
  view.showReason(null, "device");
  try {
    const opened = mic.open(settings.input);
    update();
    if (!(await opened)) return;
  } catch (error) {
    conversation.showDeviceError(micReason(error));
    return;
  }
  devices.refresh();
  keepAwake();
  update();
}

function closeMic() {
  conversation.speech.release();
  mic.close();
}

mic.addEventListener("closed", () => {
  wake?.release();
  wake = null;
  update();
});

/** The screen stays on while the microphone does. */
async function keepAwake() {
  try {
    wake = await navigator.wakeLock?.request("screen");
  } catch {
    wake = null; // not allowed on low battery or in a background tab
  }
}

async function onDevice(kind, deviceId) {
  settings[kind] = deviceId;
  settings.save();
  if (kind === "input" && mic.on) await openMic();
  if (kind === "output") await player?.setSink(deviceId).catch((error) => conversation.showDeviceError(micReason(error)));
}

function update() {
  conversation.refresh();
  showButtons();
}

function showButtons() {
  const answering = ["thinking", "speaking"].includes(view.state);
  $("stop").hidden = !answering;
  $("mute").hidden = !mic.on || settings.pushToTalk;
  $("mute").setAttribute("aria-pressed", String(mic.muted));
  $("mic-off").hidden = !mic.on;
  $("talk-button").setAttribute("aria-pressed", String(mic.on && !settings.pushToTalk));
  const labels = settings.pushToTalk ? ["Hold to talk", "Hold to talk"] : ["Talk", "End talk"];
  $("talk-label").textContent = labels[mic.on ? 1 : 0] + (view.state === "ended" ? " again" : "");
  document.body.classList.toggle("mic-on", mic.on);
  document.body.classList.toggle("push-to-talk", settings.pushToTalk);
}

// Meters

function draw() {
  $("mic-meter").style.setProperty("--level", String(loudness(mic.rms)));
  $("player-meter").style.setProperty("--level", String(loudness(player?.rms ?? 0)));
  $("talk-button").style.setProperty("--level", String(loudness(player?.playing ? player.rms : mic.rms)));
  requestAnimationFrame(draw);
}
requestAnimationFrame(draw);

/** Map a level to 0..1 over 50 dB. */
function loudness(rms) {
  return rms > 0 ? Math.max(0, Math.min(1, 1 + (20 * Math.log10(rms)) / 50)) : 0;
}

// Talking

function onPress() {
  conversation.restartIfEnded();
  if (!mic.on && !mic.opening) openMic();
  conversation.speech.press();
}

on("talk-button", "pointerdown", (event) => {
  if (!settings.pushToTalk || event.button !== 0) return;
  event.target.setPointerCapture?.(event.pointerId);
  onPress();
});
for (const end of ["pointerup", "pointercancel"]) {
  on("talk-button", end, () => {
    mic.wake();
    conversation.speech.release();
  });
}
on("talk-button", "click", () => {
  if (settings.pushToTalk) return;
  if (mic.on || mic.opening) return closeMic();
  conversation.restartIfEnded();
  openMic();
});
on("talk-button", "contextmenu", (event) => settings.pushToTalk && event.preventDefault());

function isTalkKey(event) {
  return event.code === "Space" && settings.pushToTalk && !event.target.closest?.(TYPED_IN) && !otherButton(event.target);
}

function otherButton(target) {
  const button = target.closest?.("button, a, summary");
  return button && button.id !== "talk-button";
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("stop").hidden) conversation.stop();
  if (!isTalkKey(event)) return;
  event.preventDefault();
  if (!event.repeat) onPress();
});
document.addEventListener("keyup", (event) => {
  if (isTalkKey(event)) event.preventDefault();
  if (event.code === "Space") conversation.speech.release();
});
window.addEventListener("pagehide", ({ persisted }) => persisted || socket.close());
window.addEventListener("blur", () => conversation.speech.release());
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && mic.on) keepAwake();
});

on("mute", "click", () => {
  mic.muted = !mic.muted;
  update();
});
on("mic-off", "click", closeMic);
on("stop", "click", () => conversation.stop());

// Settings

on("voice", "change", ({ target }) => {
  settings.voice = target.value;
  settings.save();
  if (settings.voice) openPlayer();
  conversation.configure();
});

function setPushToTalk(pushToTalk) {
  settings.pushToTalk = pushToTalk;
  $("push-to-talk").checked = pushToTalk;
  settings.save();
  conversation.speech.release();
  conversation.configure();
  update();
  if (pushToTalk && mic.on) $("talk-button").focus();
}

on("push-to-talk", "change", ({ target }) => setPushToTalk(target.checked));
on("reasons", "click", ({ target }) => {
  if (!target.matches(".push-to-talk-offer")) return;
  setPushToTalk(true);
  view.showReason(null, "echo");
});

// Typing

function ask(text) {
  openPlayer();
  conversation.ask(text);
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
  conversation.restart();
  $("message").focus();
});

// Saving

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

on("download", "click", async () => {
  if (conversation.turns.length === 0) return view.showReason({ title: "Nothing to save yet", text: "Say or type something first." }, "download");
  const name = `fleet-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}`;
  download(encodeTranscript(conversation.turns, model, conversation.session), `${name}.json`);
  if (!recording.empty) download(await recording.wav(), `${name}.wav`);
});

window.fleetVoice = { conversation, player, mic, socket, recording, view };
