"""Numbers of the filtered system calls, for each architecture.

Deals in data only: kernel headers (asm/unistd_64.h, asm-generic/unistd.h); a test holds them against libseccomp's.
"""

from __future__ import annotations

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""How a filter sees the architecture (AUDIT_ARCH_*, linux/audit.h)."""

_ROWS = """
ptrace 101 117
process_vm_readv 310 270
process_vm_writev 311 271
process_madvise 440 440
kcmp 312 272
pidfd_getfd 438 438
bpf 321 280
perf_event_open 298 241
userfaultfd 323 282
mount 165 40
umount2 166 39
pivot_root 155 41
chroot 161 51
move_mount 429 429
open_tree 428 428
fsopen 430 430
fsconfig 431 431
fsmount 432 432
fspick 433 433
mount_setattr 442 442
keyctl 250 219
add_key 248 217
request_key 249 218
kexec_load 246 104
kexec_file_load 320 294
init_module 175 105
finit_module 313 273
delete_module 176 106
reboot 169 142
swapon 167 224
swapoff 168 225
sethostname 170 161
setdomainname 171 162
settimeofday 164 170
clock_settime 227 112
clock_adjtime 305 266
adjtimex 159 171
acct 163 89
quotactl 179 60
quotactl_fd 443 443
syslog 103 116
open_by_handle_at 304 265
fanotify_init 300 262
lookup_dcookie 212 18
iopl 172 -
ioperm 173 -
modify_ldt 154 -
uselib 134 -
vhangup 153 58
nfsservctl 180 42
unshare 272 97
setns 308 268
setsid 112 157
setpgid 109 154
shmget 29 194
semget 64 190
msgget 68 186
mq_open 240 180
migrate_pages 256 238
connect 42 203
bind 49 200
listen 50 201
accept 43 202
accept4 288 242
socketpair 53 199
memfd_secret 447 447
seccomp 317 277
io_uring_setup 425 425
io_uring_enter 426 426
io_uring_register 427 427
clone3 435 435
clone 56 220
socket 41 198
prlimit64 302 261
setpriority 141 140
sched_setaffinity 203 122
sched_setscheduler 144 119
sched_setparam 142 118
sched_setattr 314 274
ioprio_set 251 30
chmod 90 -
fchmod 91 52
fchmodat 268 53
fchmodat2 452 452
chown 92 -
fchown 93 55
lchown 94 -
fchownat 260 54
setxattr 188 5
lsetxattr 189 6
fsetxattr 190 7
removexattr 197 14
lremovexattr 198 15
fremovexattr 199 16
utime 132 -
utimes 235 -
futimesat 261 -
utimensat 280 88
setxattrat 463 463
removexattrat 466 466
open_tree_attr 467 467
file_setattr 469 469
"""

NUMBERS: dict[str, dict[str, int]] = {"x86_64": {}, "aarch64": {}}
"""Architecture to name to number; a name that an architecture lacks is left out."""

for _name, *_numbers in map(str.split, _ROWS.split("\n")[1:-1]):
    for _machine, _number in zip(NUMBERS, _numbers, strict=True):
        if _number != "-":
            NUMBERS[_machine][_name] = int(_number)

__all__ = ["AUDIT", "NUMBERS"]
