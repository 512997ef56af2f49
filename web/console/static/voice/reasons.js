// Why something failed, in words that say what to do. Knows no page.

/** @typedef {{title: string, text: string, command?: string}} Reason */

/** This page's address gives neither sound nor microphone. */
export class NoSound extends Error {
  constructor() {
    super("this address gives a page no sound");
    this.name = "NoSound";
  }
}

/** The way in that a browser trusts: through ssh, or https. @returns {Reason} */
export function insecureReason() {
  const port = location.port || "80";
  return {
    title: "No sound at this address",
    text: `Browsers give sound and a microphone only to https and to localhost. Run this on your own machine, then open http://localhost:${port}; or serve https with --set web.tls=self-signed. Typing works here.`,
    command: `ssh -L ${port}:127.0.0.1:${port} USER@${location.hostname}`,
  };
}

const OF_MICROPHONE = {
  NotAllowedError: ["The microphone is not allowed", "Allow it in the address bar (the microphone or lock sign), then press Talk again. Typing works without."],
  NotFoundError: ["No microphone found", "Plug one in and press Talk again. Typing works without."],
  NotReadableError: ["The microphone is busy", "Another program holds it, or the system refuses it. Close that program, or choose another microphone below."],
  lost: ["The microphone is gone", "It was unplugged or switched off. Choose another one below and press Talk again."],
};

/** @param {{name: string, message: string}} error of getUserMedia or the player @returns {Reason} */
export function micReason(error) {
  if (!window.isSecureContext || error.name === "NoSound") return insecureReason();
  const [title, text] = OF_MICROPHONE[error.name] ?? ["The microphone does not start", `${error.message}. Choose another one below.`];
  return { title, text };
}

const OF_CODES = {
  overloaded: "Then ask again.",
  rate_limit_exceeded: "Ask again in a moment.",
  redis_unreachable: "The fleet is waiting for its Redis server; see the logs.",
};

function sentence(text) {
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

/** @param {{message?: string, code?: string|null}|null|undefined} error of an `error` event or a failed response @returns {Reason} */
export function serverReason(error) {
  const hint = OF_CODES[error?.code] ?? "";
  return { title: "The answer failed", text: `${sentence(error?.message ?? "The server gave no reason; its log tells.")} ${hint}`.trim() };
}

/** A refusal's reason begins with its type and code, for programs. */
const TYPE_AND_CODE = /^[a-z_]+\.[a-z_]+: /;

/** @param {{code: number, reason: string}} close @returns {boolean} true if the server ended the session because its client was idle */
export function isIdleEnd({ code, reason }) {
  return code === 1000 && reason.includes(".session_idle: ");
}

/** @param {{code: number, reason: string}} close @returns {Reason} */
export function refusedReason({ code, reason: full }) {
  const reason = full.replace(TYPE_AND_CODE, "");
  if (code === 1013) return { title: "The server takes nobody now", text: `${reason || "All places are taken."} This page tries again by itself.` };
  if (code === 1000) {
    if (isIdleEnd({ code, reason: full }))
      return { title: "This conversation was idle for too long", text: "The microphone is off. Talk again, or type, to continue it." };
    return { title: "An operator ended this conversation", text: "The microphone is off. Talk again, or type, to begin another." };
  }
  return { title: "The server refused this page", text: `${sentence(reason || "No reason was given")} Reload the page to log in again.` };
}

export const GATEWAY_AWAY = {
  title: "The gateway is away",
  text: "This page tries again by itself and goes on where it was. If it stays so: is `fleet up` (or `honcho start`) still running?",
};
export const SESSION_LOST = {
  title: "The conversation was begun anew",
  text: "The server no longer had it. What was said was told again as text.",
};
export const NOTHING_HEARD = {
  title: "Nothing was heard",
  text: "Hold the button, or the space bar, for as long as you speak.",
};
export const MIC_WAS_STARTING = {
  title: "The microphone was still opening",
  text: "Nothing of that was recorded. Hold the button, or the space bar, again, and speak once “Hearing you” is shown.",
};
export const ECHO_HEARD = {
  title: "Is the model hearing itself?",
  text: "It was interrupted twice just as it began to speak. Use headphones, or hold the button while you talk.",
};
