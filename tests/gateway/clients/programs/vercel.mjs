// An agent of Vercel's AI SDK, unmodified: `vercel.mjs API MODE URL KEY`, in the workspace. Prints both answers as JSON.
import { execSync } from "node:child_process";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [api, mode, url, key] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: key });
const model = { chat: () => openai.chat("policy"), responses: () => openai.responses("policy"), anthropic: () => anthropic("policy") }[api]();

const run = tool({
  description: "Runs a command and returns its output.",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => execSync(command, { encoding: "utf8", stdio: ["ignore", "pipe", "pipe"] }),
});

const options = { model, tools: { run }, instructions: "Use tools.", stopWhen: stepCountIs(6), maxRetries: 0 };
if (mode === "object") options.output = Output.object({ schema: z.object({ lines: z.number() }) });

const messages = [];
const answers = [];
for (const content of ["How many lines has f?", "And now?"]) {
  messages.push({ role: "user", content });
  const result = mode === "streamed" ? streamText({ ...options, messages }) : await generateText({ ...options, messages });
  if (mode === "streamed") for await (const _ of result.fullStream);
  answers.push(mode === "object" ? result.output : await result.text);
  messages.push(...(await result.responseMessages));
}
console.log(JSON.stringify(answers));
