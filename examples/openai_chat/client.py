"""Ask models over OpenAI's API with nothing but the standard library.

With the client of OpenAI it is `OpenAI(base_url=f"http://{url}/v1", api_key="none")`; see the README.
"""

import argparse
import http.client
import json


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8000", help="host:port of the HTTP endpoint")
    connection = http.client.HTTPConnection(parser.parse_args().url)

    models = json.loads(ask(connection, "GET", "models"))
    print("models:", [model["id"] for model in models["data"]])

    messages = [{"role": "user", "content": "Polly wants a cracker"}]
    body = {"model": "parrot", "messages": messages, "max_tokens": 2}
    answer = json.loads(ask(connection, "POST", "chat/completions", body))
    choice = answer["choices"][0]
    print("chat:", choice["message"]["content"], f"({choice['finish_reason']})", answer["usage"])

    body = {"model": "parrot", "messages": messages, "stream": True}
    lines = ask(connection, "POST", "chat/completions", body).splitlines()
    *chunks, last = [line.removeprefix("data: ") for line in lines if line]
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    print("streamed:", [delta.get("content") for delta in deltas], last)

    body = {"model": "next_word", "prompt": "row row row your", "max_tokens": 2}
    answer = json.loads(ask(connection, "POST", "completions", body))
    print("completion:", answer["choices"][0]["text"])

    body = {"model": "letters", "input": ["silent", "listen", "loud"]}
    answer = json.loads(ask(connection, "POST", "embeddings", body))
    silent, listen, loud = (row["embedding"] for row in answer["data"])
    print(f"similar: {dot(silent, listen):.2f} {dot(silent, loud):.2f}")


def ask(connection, method, path, body=None):
    connection.request(method, f"/v1/{path}", None if body is None else json.dumps(body))
    return connection.getresponse().read().decode()


def dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    main()
