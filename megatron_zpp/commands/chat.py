"""Chat with a checkpoint's model in a terminal."""

import argparse
import io
import sys

from megatron_zpp.commands import generate_text
from megatron_zpp.commands.common import given_architecture
from megatron_zpp.commands.generate_text import utf8_text
from megatron_zpp.data.text.tokenizers import chat_tokenizer
from megatron_zpp.errors import reports_errors
from megatron_zpp.settings.flags import path_or_url


@reports_errors
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Chat with a checkpoint's model.", allow_abbrev=False)
    add = parser.add_argument
    add("--load", type=path_or_url, required=True, metavar="DIR|URL", help="folder given to --save in training")
    add("--system", type=utf8_text, metavar="TEXT", help="the system's message, before yours")
    generate_text.add_drawing_flags(parser, num_tokens=512)
    generate_text.add_checkpoint_flags(parser)
    args = parser.parse_args(argv)
    checkpoint, meta, settings, tokenizer = generate_text.open_checkpoint(args)
    chats = chat_tokenizer(tokenizer, settings["tokenizer_type"])
    device, architecture = generate_text.chosen_device(args), given_architecture(args)
    model = generate_text.load_model(checkpoint, meta, device, architecture)
    beginning = [{"role": "system", "content": args.system}] if args.system is not None else []
    messages = list(beginning)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as on the command line, where utf8_text refuses such bytes
    if sys.stdin.isatty():
        import readline  # noqa: F401  # lets input() edit lines, and recall earlier ones

        print("/new begins again, Ctrl-C ends an answer, Ctrl-D the chat")
    while True:
        try:
            said = utf8_text(input("> " if sys.stdin.isatty() else "").strip())
        except (EOFError, KeyboardInterrupt):
            print()
            return
        except argparse.ArgumentTypeError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        if said == "/new":
            messages = list(beginning)
        if said in ("", "/new"):
            continue
        messages.append({"role": "user", "content": said})
        answer, prompts = "", chats.apply_chat_template([messages])
        try:
            for piece in generate_text.continue_texts(args, settings, tokenizer, model, prompts):
                print(piece, end="", flush=True)
                answer += piece
        except KeyboardInterrupt:  # the chat goes on with what was said so far
            pass
        print()
        messages.append({"role": "assistant", "content": answer})
