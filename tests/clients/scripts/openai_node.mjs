// `openai` for Node: the API's own client. Arguments: its environment, URL, model, WAV file. Prints one JSON line per feature.
import assert from "node:assert/strict";
import { createReadStream } from "node:fs";
import { createRequire } from "node:module";

const [home, URL, MODEL, WAV] = process.argv.slice(2);
const OpenAI = createRequire(`${home}/`)("openai").default;
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const SAID = "Hello there, this is the answer.";
const messages = [{ role: "user", content: "hello" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
  additionalProperties: false,
};
const WANTED = { city: "Paris", days: 2 };
const chat = (fields) => client.chat.completions.create({ model: MODEL, messages, ...fields });

async function check_chat() {
  assert.equal((await chat({})).choices[0].message.content, SAID);
}

async function check_chat_stream() {
  let said = "";
  for await (const chunk of await chat({ stream: true })) said += chunk.choices[0]?.delta.content ?? "";
  assert.equal(said, SAID);
}

async function check_chat_tools() {
  const called = [];
  const runner = client.chat.completions.runTools({
    model: MODEL,
    messages,
    tools: [{ type: "function", function: { name: "get_weather", description: "The weather.", parameters, parse: JSON.parse, function: (given) => { called.push(given); return "25 C"; } } }],
  });
  assert.equal(await runner.finalContent(), SAID);
  assert.deepEqual(called, [WANTED]);
}

async function check_chat_parse() {
  const response_format = { type: "json_schema", json_schema: { name: "forecast", strict: true, schema: parameters } };
  const answer = await client.chat.completions.parse({ model: MODEL, messages, response_format });
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), WANTED);
}

async function check_responses() {
  const first = await client.responses.create({ model: MODEL, input: "hello" });
  const second = await client.responses.create({ model: MODEL, input: "and now?", previous_response_id: first.id });
  assert.equal(first.output_text + second.output_text, SAID + SAID);
}

async function check_responses_stream() {
  const final = await client.responses.stream({ model: MODEL, input: "hello" }).finalResponse();
  assert.equal(final.output_text, SAID);
}

async function check_transcription() {
  const heard = await client.audio.transcriptions.create({ model: MODEL, file: createReadStream(WAV) });
  assert.equal(heard.text, "What day comes after Monday?");
}

async function check_speech() {
  const answer = await client.audio.speech.create({ model: MODEL, voice: "marin", input: "hello", response_format: "wav" });
  assert.equal(Buffer.from(await answer.arrayBuffer()).subarray(0, 4).toString(), "RIFF");
}

async function check_models() {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.deepEqual(ids, [MODEL]);
}

const checks = [check_chat, check_chat_stream, check_chat_tools, check_chat_parse, check_responses, check_responses_stream, check_transcription, check_speech, check_models];
for (const check of checks) {
  const why = await check().then(() => "", (error) => `${error.name}: ${error.message}`);
  console.log(JSON.stringify({ feature: check.name.slice(6), ok: why === "", why }));
}
