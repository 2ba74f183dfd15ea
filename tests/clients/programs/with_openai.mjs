// openai for Node: models, chat, completions, responses, whole and streamed. Prints JSON.
import OpenAI from "openai";

const [url, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "any" });
const messages = [{ role: "user", content: question }];
const request = { model: "sprig", messages, seed: 3, max_tokens: 24 };

async function joined(stream, text) {
  let all = "";
  for await (const item of stream) all += text(item) ?? "";
  return all;
}

const whole = await client.chat.completions.create(request);
const streamed = await joined(
  await client.chat.completions.create({ ...request, stream: true }),
  (chunk) => chunk.choices[0]?.delta?.content,
);
const helper = await client.chat.completions.stream(request).finalContent();
const completion = await client.completions.create({
  model: "sprig", prompt: question, seed: 3, max_tokens: 8,
});
const responseRequest = { model: "sprig", input: question, seed: 3, max_output_tokens: 24 };
const response = await client.responses.create(responseRequest);
const responseStreamed = await joined(
  await client.responses.create({ ...responseRequest, stream: true }),
  (event) => (event.type === "response.output_text.delta" ? event.delta : ""),
);
const search = { policy: "rebase", width: 2, seed: 11 };
const searchReply = await client.chat.completions.create({ model: "sprig", messages, search });
const refusal = await client.chat.completions
  .create({ ...request, search: { wdith: 2 } })
  .catch((error) => [error.status, error.param]);
console.log(
  JSON.stringify({
    models: (await client.models.list()).data.map((model) => model.id),
    whole: whole.choices[0].message.content,
    streamed,
    helper,
    completion: completion.choices[0].text,
    response: response.output_text,
    response_streamed: responseStreamed,
    search: searchReply.choices[0].message.content,
    refused: refusal,
  }),
);
