"""Sends messages to an SQS queue with boto3: sqssend.py ENDPOINT QUEUE_URL MOST < LINES

A line is GROUP, tab, BODY. Ten messages go in one call, from several threads; the
messages of a group are sent by one thread and so in their order. In a FIFO queue
every line is a message of its own: none is left out as a duplicate. It waits while
more than MOST messages can be received.
"""
import sys
import threading
import time
import uuid
import zlib

import boto3
from botocore.config import Config

THREADS = 4
endpoint, url, most = sys.argv[1:]
fifo = url.endswith(".fifo")
shares = [[] for _ in range(THREADS)]
for number, line in enumerate(sys.stdin.buffer.read().decode().splitlines()):
    group, body = line.split("\t", 1)
    entry = {"Id": str(number), "MessageBody": body}
    if fifo:
        entry.update(MessageGroupId=group, MessageDeduplicationId=str(uuid.uuid4()))
    shares[zlib.crc32(group.encode()) % THREADS].append(entry)

sqs = boto3.client(
    "sqs", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret",
    config=Config(max_pool_connections=THREADS),
)
failures = []


def backlog():
    name = "ApproximateNumberOfMessages"
    return int(sqs.get_queue_attributes(QueueUrl=url, AttributeNames=[name])["Attributes"][name])


def send(share):
    try:
        for at in range(0, len(share), 10):
            while at % 50 == 0 and backlog() > int(most):
                time.sleep(0.05)
            answer = sqs.send_message_batch(QueueUrl=url, Entries=share[at:at + 10])
            if answer.get("Failed"):
                raise RuntimeError(answer["Failed"])
    except Exception as e:  # told by the main thread
        failures.append(e)


threads = [threading.Thread(target=send, args=(share,)) for share in shares]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if failures:
    sys.exit(f"sqssend: {failures[0]!r}")
