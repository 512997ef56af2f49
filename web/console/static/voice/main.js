// The Voice page: connects its parts, buttons and keys.

import * as asCode from "./as-code.js";
import { Conversation } from "./conversation.js";
import { Devices } from "./devices.js";
import { Microphone } from "./mic.js";
import { NoiseMeter } from "./noise.js";
import { PageView } from "./page.js";
import { Player } from "./player.js";
import { insecureReason, micReason } from "./reasons.js";
import { encodeTranscript, Recording } from "./recording.js";
import { SessionPanel } from "./session-panel.js";
import { Settings } from "./settings.js";
import { Socket } from "./socket.js";

const $ = (id) => document.getElementById(id);
const { model, rateHz, stages, playerWorklet, micWorklet } = document.body.dataset;
const on = (id, event, handler) => $(id)?.addEventListener(event, handler);
const TYPED_IN = "textarea, input, select";
const TALK_NOTES = { down: "Speech is down: no answer", waits: "The answer waits for a worker" };

const settings = new Settings();
const colours = new Map(stages.split(",").map((name, number) => [name, number % 6]));
const view = new PageView(colours);
const speaks = Number(rateHz) > 0;
const player = speaks ? new Player(playerWorklet, Number(rateHz)) : null;
const mic = new Microphone(micWorklet);
const noise = new NoiseMeter();
const panel = new SessionPanel(settings, onSetting);
const socket = new Socket(() => conversation.url);
let wake = null;

const recording = new Recording();
const conversation = new Conversation({ model, socket, player, mic, recording, view, panel, settings });
const devices = new Devices(settings, onDevice);
view.onState = showButtons;
view.onResult = (call, output) => {
  openPlayer();
  conversation.sendResult(call, output);
};
view.onQuestion = showCode;
new MutationObserver(showButtons).observe($("speech"), { childList: true, subtree: true, attributes: true });
showButtons();
socket.connect();
if (!window.isSecureContext) view.showReason(insecureReason(), "device");

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
  $("commit").hidden = !mic.on || settings.turns !== "none";
  $("talk-button").setAttribute("aria-pressed", String(mic.on && !settings.pushToTalk));
  const labels = settings.pushToTalk ? ["Hold to talk", "Hold to talk"] : ["Talk", "End talk"];
  $("talk-label").textContent = labels[mic.on ? 1 : 0] + (view.state === "ended" ? " again" : "");
  const trouble = $("trouble")?.dataset ?? {};
  const level = settings.voice || trouble.text !== "works" ? trouble.level : "";
  $("talk-note").textContent = TALK_NOTES[level] ?? (settings.pushToTalk ? "Records while held" : `${mic.on ? "Closes" : "Opens"} the microphone`);
  document.body.classList.toggle("mic-on", mic.on);
  document.body.classList.toggle("push-to-talk", settings.pushToTalk);
}

// Meters: drawn by transforms, and only while there is sound

const NOISE_EVERY_MS = 250;
let drawing = false;
let noiseShownAt = 0;

mic.addEventListener("open", () => {
  noise.reset();
  startDrawing();
});
mic.addEventListener("block", ({ detail }) => mic.muted || noise.add(detail.rms));
player?.addEventListener("started", startDrawing);

function startDrawing() {
  if (!drawing) requestAnimationFrame(draw);
  drawing = true;
}

function draw(now) {
  const level = loudness(player?.playing ? player.rms : mic.rms);
  for (const [id, value] of [["mic-meter", loudness(mic.rms)], ["player-meter", loudness(player?.rms ?? 0)], ["talk-button", level]]) {
    $(id).style.setProperty("--level", String(value));
  }
  if (now - noiseShownAt >= NOISE_EVERY_MS || !mic.on) showNoise(now);
  drawing = mic.on || Boolean(player?.playing);
  if (drawing) requestAnimationFrame(draw);
}

function showNoise(now) {
  noiseShownAt = now;
  const floor = noise.floor ?? noise.level;
  $("mic-meter").style.setProperty("--floor", String(share(floor)));
  const levels = `${Math.round(noise.level)} dBFS, floor ${Math.round(floor)}`.replaceAll("-", "−");
  $("noise").textContent = mic.on && noise.hint ? `${noise.hint} · ${levels}` : "";
}

function loudness(rms) {
  return rms > 0 ? share(20 * Math.log10(rms)) : 0;
}

/** Map a level to 0..1 over 60 dB. */
function share(dbfs) {
  return Math.max(0, Math.min(1, 1 + dbfs / 60));
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
on("commit", "click", () => conversation.speech.end());

// Settings

/** @param {string} name of the setting that the user has changed */
function onSetting(name) {
  if (name === "voice" && settings.voice) openPlayer();
  if (name === "turns") conversation.speech.release();
  conversation.configure();
  update();
  showCode();
}

on("reasons", "click", ({ target }) => {
  if (!target.matches(".push-to-talk-offer")) return;
  Object.assign(settings, { turns: "push" }).save();
  panel.show();
  onSetting("turns");
  view.showReason(null, "echo");
  if (mic.on) $("talk-button").focus();
});

// As code

function showCode() {
  if (!$("code-fold").open) return;
  const question = conversation.turns.findLast(({ role }) => role === "user");
  const text = question?.kind === "speech" ? null : (question?.text ?? "Hello");
  $("code").textContent = asCode[$("language").value]({ origin: location.origin, model, session: conversation.sessionFields, text });
  $("code-note").textContent = text === null ? "question.wav: the question, 24 kHz, mono, 16 bit" : "";
}
on("code-fold", "toggle", showCode);
on("language", "change", showCode);
showCode();

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
