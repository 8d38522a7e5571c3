"""An S3 server, moto's, that a test may tell to hold or to refuse requests: ``python s3_server.py PORT ORDERS``.

ORDERS is a file: "hold WORD" makes ORDERS.held at a request to write an object with WORD in its name, and does not
answer before ORDERS.release is there; "refuse STATUS CODE" answers all with that error; nothing serves.
"""

import sys
import time
from pathlib import Path

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

port, orders = int(sys.argv[1]), Path(sys.argv[2])
s3 = DomainDispatcherApplication(create_backend_app)


def serve(environ, start_response):
    action, *words = orders.read_text().split() or [""]
    if action == "hold" and environ["REQUEST_METHOD"] != "GET" and words[0] in environ["PATH_INFO"]:
        Path(f"{orders}.held").touch()
        while not Path(f"{orders}.release").exists():
            time.sleep(0.05)
        action, *words = orders.read_text().split() or [""]
    if action == "refuse":
        status, code = words
        start_response(f"{status} Error", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>The server says {code}.</Message></Error>".encode()]
    return s3(environ, start_response)


run_simple("127.0.0.1", port, serve, threaded=True)
