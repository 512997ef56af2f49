// Texts for failures: each names the cause and the remedy.

/** @typedef {{title: string, text: string, command?: string}} Reason */

/** Browsers allow neither audio nor microphone at this page's address. */
export class AudioNotAllowed extends Error {
  constructor() {
    super("browsers allow no audio at this address");
    this.name = "AudioNotAllowed";
  }
}

/** Explain how to reach the page at an address that browsers trust: through ssh, or https. @returns {Reason} */
export function insecureReason() {
  const port = location.port || "80";
  return {
    title: "No audio at this address",
    text: `Browsers allow audio and the microphone only on https and localhost. Run this command on your own machine, then open http://localhost:${port}; or serve https with --set web.tls=self-signed. Typing works here.`,
    command: `ssh -L ${port}:127.0.0.1:${port} USER@${location.hostname}`,
  };
}

const MICROPHONE_REASONS = {
  NotAllowedError: ["The microphone is not allowed", "Allow it in the address bar (the microphone or lock icon), then press Talk again. Typing works without it."],
  NotFoundError: ["No microphone found", "Plug one in and press Talk again. Typing works without it."],
  NotReadableError: ["The microphone is busy", "Another program uses it, or the system refuses access. Close that program, or choose another microphone below."],
  lost: ["The microphone was disconnected", "It was unplugged or switched off. Choose another one below and press Talk again."],
};

/** @param {{name: string, message: string}} error of getUserMedia or the player @returns {Reason} */
export function micReason(error) {
  if (!window.isSecureContext || error.name === "AudioNotAllowed") return insecureReason();
  const [title, text] = MICROPHONE_REASONS[error.name] ?? ["The microphone did not start", `${error.message}. Choose another one below.`];
  return { title, text };
}

const HINTS = {
  overloaded: "Then ask again.",
  rate_limit_exceeded: "Ask again in a moment.",
  redis_unreachable: "The fleet is waiting for its Redis server; see the logs.",
};

function sentence(text) {
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

/** @param {{message?: string, code?: string|null}|null|undefined} error of an `error` event or a failed response @returns {Reason} */
export function serverReason(error) {
  const hint = HINTS[error?.code] ?? "";
  return { title: "The answer failed", text: `${sentence(error?.message ?? "The server gave no reason; see its log.")} ${hint}`.trim() };
}

/** Prefix of a close reason, meant for programs. */
const TYPE_AND_CODE = /^[a-z_]+\.[a-z_]+: /;

/** @param {{code: number, reason: string}} close @returns {boolean} true if the server ended the session because its client was idle */
export function isIdleEnd({ code, reason }) {
  return code === 1000 && reason.includes(".session_idle: ");
}

/** @param {{code: number, reason: string}} close @returns {Reason} */
export function refusedReason({ code, reason: full }) {
  const reason = full.replace(TYPE_AND_CODE, "");
  if (code === 1013) return { title: "The server is full", text: `${reason || "All voice sessions are in use."} This page retries automatically.` };
  if (code === 1000) {
    if (isIdleEnd({ code, reason: full }))
      return { title: "This conversation was idle for too long", text: "The microphone is off. Talk again, or type, to continue it." };
    return { title: "An operator ended this conversation", text: "The microphone is off. Talk again, or type, to begin another." };
  }
  return { title: "The server refused this page", text: `${sentence(reason || "No reason was given")} Reload the page to log in again.` };
}

export const GATEWAY_AWAY = {
  title: "The gateway does not answer",
  text: "This page reconnects automatically and continues where it was. If that takes long, check that `fleet up` (or `honcho start`) is running.",
};
export const SESSION_LOST = {
  title: "The conversation was restored as text",
  text: "The server no longer had its session; a new session received the history as text.",
};
export const NOTHING_RECORDED = {
  title: "Nothing was recorded",
  text: "Hold the button, or the space bar, while you speak.",
};
export const MIC_WAS_OPENING = {
  title: "The microphone was still opening",
  text: "Nothing was recorded. Hold the button, or the space bar, again, and speak once “Hearing you” is shown.",
};
export const ECHO_SUSPECTED = {
  title: "The model may be hearing itself",
  text: "It was interrupted twice just as it began to speak. Use headphones, or push to talk.",
};
