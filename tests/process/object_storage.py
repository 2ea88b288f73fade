"""An S3 server on loopback, behind a proxy that counts downloads and fails as networks do."""

import http.client
import socket
import threading
import uuid
from contextlib import contextmanager

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Storage:
    """A bucket, its URL through the proxy, and the proxy's state.

    ``stall_after`` and ``cut_after``: bytes of answers after which they stop, or their connections end.
    """

    def __init__(self, client, upstream, bucket):
        self.client = client
        self._bucket = bucket
        self.requests = []
        self.stall_after = self.cut_after = None
        self.stalled = threading.Event()
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.server = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"s3://{self.server}/{bucket}"
        threading.Thread(target=self._accept, daemon=True).start()

    def upload(self, folder):
        """Put all files of a directory, as a repository of models."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(str(path.relative_to(folder)), path.read_bytes())

    def put(self, key, content):
        self.client.put_object(Bucket=self._bucket, Key=key, Body=content)

    def delete(self, prefix):
        for each in self.client.list_objects_v2(Bucket=self._bucket, Prefix=prefix)["Contents"]:
            self.client.delete_object(Bucket=self._bucket, Key=each["Key"])

    def downloads(self):
        """Return the keys that were downloaded since the last call."""
        given, self.requests = self.requests, []
        keys = [line.split(" ")[1].partition("?")[0] for line in given]
        return sorted(
            key.removeprefix(f"/{self._bucket}/") for key in keys if key != f"/{self._bucket}"
        )

    @contextmanager
    def checked_keys(self):
        """Refuse requests whose keys are nobody's, as those of the tests are."""
        self._check_after("0")
        try:
            yield
        finally:
            self._check_after("inf")

    def _check_after(self, requests):
        connection = http.client.HTTPConnection(*self._upstream)
        connection.request("POST", "/moto-api/reset-auth", requests)
        assert connection.getresponse().status == 200
        connection.close()

    def close(self):
        self._listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._upstream)
            threading.Thread(target=self._ask, args=(client, server), daemon=True).start()
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _ask(self, client, server):
        with client, server:
            while data := _receive(client):
                if data.startswith(b"GET "):
                    self.requests.append(data.partition(b"\r\n")[0].decode())
                server.sendall(data)

    def _answer(self, server, client):
        sent = 0
        while data := _receive(server):
            sent += len(data)
            if self.stall_after is not None and sent > self.stall_after:
                self.stalled.set()
                return
            if self.cut_after is not None and sent > self.cut_after:
                client.shutdown(socket.SHUT_RDWR)
                return
            client.sendall(data)


def _receive(end):
    try:
        return end.recv(1 << 16)
    except OSError:
        return b""


@contextmanager
def s3_storage(boto3, moto_server):
    """Run an S3 server with an empty bucket."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    upstream = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{upstream[0]}:{upstream[1]}",
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    # The server's state is its process's.
    bucket = f"models-{uuid.uuid4()}"
    client.create_bucket(Bucket=bucket)
    storage = Storage(client, upstream, bucket)
    try:
        yield storage
    finally:
        storage.close()
        client.close()
        server.stop()
