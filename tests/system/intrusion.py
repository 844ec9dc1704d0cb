"""Programs that try to get out of a sandbox, or through Docker's resolver. They run in containers."""

from __future__ import annotations

# Asks for one name after another. argv: a domain, seconds. Prints how many it asked for.
ASK = """\
import socket, sys, time
end = time.monotonic() + float(sys.argv[2])
asked = 0
while time.monotonic() < end:
    asked += 1
    try:
        socket.getaddrinfo(f"{asked}.{sys.argv[1]}", 443)
    except OSError:
        time.sleep(0.01)
print(asked)
"""


# What root in a sandbox's network namespace can try. argv: forbidden IPv4, forbidden IPv6, gateway, another
# address of the subnet. Prints how much of each kind left the program.
ATTACK = """\
import fcntl, json, socket, struct, sys
forbidden, forbidden6, gateway, borrowed = sys.argv[1:]
SIOCSIFADDR, SIOCSIFNETMASK, SIOCGIFINDEX, SIOCGIFHWADDR, SIOCGIFADDR = 0x8916, 0x891C, 0x8933, 0x8927, 0x8915
plain = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
def ask(name, number): return fcntl.ioctl(plain, number, struct.pack("256s", name.encode()))
def send(bound, target, family=socket.AF_INET, count=200):
    s, sent = socket.socket(family, socket.SOCK_DGRAM), 0
    if bound: s.bind((bound, 0))
    for _ in range(count):
        try: s.sendto(b"flood", (target, 9)); sent += 1
        except OSError: pass
    return sent
told = {"own": send(None, forbidden)}
own = socket.inet_ntoa(ask("eth0", SIOCGIFADDR)[20:24])
def address(value): return struct.pack("16sH2s4s8s", b"eth0:1", socket.AF_INET, b"", socket.inet_aton(value), b"")
fcntl.ioctl(plain, SIOCSIFADDR, address(borrowed))
fcntl.ioctl(plain, SIOCSIFNETMASK, address("255.255.255.192"))
told["borrowed"] = send(borrowed, forbidden)
send(None, gateway, count=1)
index = struct.unpack("i", ask("eth0", SIOCGIFINDEX)[16:20])[0]
mac = ask("eth0", SIOCGIFHWADDR)[18:24]
rows = [line.split() for line in open("/proc/net/arp")][1:]
peer = next(bytes.fromhex(row[3].replace(":", "")) for row in rows if row[0] == gateway)
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16: total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
def datagram(source):
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 33, 1, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(forbidden))
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    return head + struct.pack("!HHHH", 9, 9, 13, 0) + b"flood"
raw, told["raw"] = socket.socket(socket.AF_PACKET, socket.SOCK_RAW), 0
raw.bind(("eth0", 0))
for source in (own, borrowed, gateway, "198.51.100.2", "0.0.0.0"):
    for _ in range(50):
        told["raw"] += raw.send(peer + mac + b"\\x08\\x00" + datagram(source)) > 0
        raw.send(peer + mac + b"\\x81\\x00\\x00\\x01\\x08\\x00" + datagram(source))
six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
fcntl.ioctl(six, SIOCSIFADDR, struct.pack("16sIi", socket.inet_pton(socket.AF_INET6, "2001:db8:9::2"), 64, index))
# ipv6_rtmsg: a default route through the device itself.
route = struct.pack("16s16s16sIHHIQIi", bytes(16), bytes(16), bytes(16), 0, 0, 0, 1, 0, 1, index)
fcntl.ioctl(six, 0x890B, route)
told["six"] = send(None, forbidden6, socket.AF_INET6, 20)
frame6 = struct.pack("!IHBB16s16s", 6 << 28, 8, 17, 64, socket.inet_pton(socket.AF_INET6, "2001:db8:9::2"), socket.inet_pton(socket.AF_INET6, forbidden6))
for _ in range(50):
    told["raw6"] = told.get("raw6", 0) + (raw.send(peer + mac + b"\\x86\\xdd" + frame6 + struct.pack("!HHHH", 9, 9, 8, 0)) > 0)
print(json.dumps(told))
"""

# Sends through one link, whatever the routes say; any user may. argv: the link, an address, seconds.
BOUND = """\
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, sys.argv[1].encode())
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    try: s.sendto(b"flood", (sys.argv[2], 9))
    except OSError: pass
"""
