// Fault injection for programs that change files: an LD_PRELOAD library for Linux on x86-64.
//
//   cc -shared -fPIC -O2 -o layer.so layer.c
//   LD_PRELOAD=./layer.so FAULT_ROOTS=/tmp/run FAULT_TRACE=/tmp/trace FAULT_FAIL=12 FAULT_ERRNO=5 program
//
// Wrappers of libc functions would miss the system calls that Rust's `rustix` makes directly (`tempfile` renames with
// it). So this library installs a seccomp filter that turns every system call that changes files into the signal
// SIGSYS. The handler of that signal notes the call, and makes it, refuses it, or ends the process. Calls from the
// threads of a program are made one at a time, so the trace has the order in which the calls took effect.
//
// Environment variables. A list of folders has `:` between absolute real paths. Calls on paths below FAULT_ROOTS are
// counted from 1 on, also those that fail.
//
//   FAULT_ROOTS        folders whose calls are counted, traced and failed
//   FAULT_TRACE        file to which a record of each of these calls, and of each violation, is appended
//   FAULT_FAIL=N       call N fails ...
//   FAULT_ERRNO=E      ... with this error number (default: 5, EIO)
//   FAULT_STAYS=1      so do all later calls that can fail with this error. With ENOSPC these are calls that need room;
//                      a write at call N then writes half of its bytes.
//   FAULT_KILL=N       the process is killed before call N
//   FAULT_JAIL         folders outside of which nothing may be opened for writing, renamed, linked or deleted. Such a
//                      call is noted as a violation and fails with EACCES. Symbolic links are resolved.
//   FAULT_NO_SYNC=1    fsync and fdatasync do nothing and are not noted, to test the tests
//
// `copy_file_range`, `sendfile` to a file and `fallocate` fail as on a file system without them: programs then write.
// Files that are mapped into memory to be changed are noted and not supported.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef __x86_64__
#error "the layer knows the system calls of x86-64 only"
#endif

#define LONGEST 8192
#define CHANGES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)

// A record of the trace: this head, both paths, then the data of a write. The first path is the new name of a rename
// or a link, the second one the old name, or the text of a symbolic link.
struct head {
    uint64_t number; // of the call, 0 for a violation outside of the roots
    int64_t result;  // of the system call, or -errno
    int64_t offset;  // of a write; new size of a truncation; flags of an opening
    uint32_t path_bytes, other_bytes, data_bytes;
    char kind; // o open, w write, t truncate, r rename, l hard link, s symbolic link, u unlink, d rmdir, m mkdir,
               // f sync, x permissions and times, ? not supported
    char injected, violation, is_new;
};

static const char *roots, *jail;
static long fail_at, kill_at, fail_errno = EIO;
static int stays, no_sync, trace = -1;
static uint64_t count;
static volatile int lock;
// Used while the lock is held.
static char path[2 * LONGEST], other[2 * LONGEST], scratch[LONGEST], link_text[LONGEST];

// A copy of this code at a fixed address makes all system calls of the layer. The filter lets this address pass, also
// in programs that the process executes.
#define STUB 0x7e0000000000
extern const char stub_code[], stub_return[], stub_end[];
__asm__(".text\nstub_code:\n"
        "mov %rdi, %rax\n mov %rsi, %rdi\n mov %rdx, %rsi\n mov %rcx, %rdx\n mov %r8, %r10\n mov %r9, %r8\n"
        "mov 8(%rsp), %r9\n syscall\n"
        "stub_return: ret\nstub_end:\n");
#define call ((long (*)(long, long, long, long, long, long, long))STUB)
#define CALL(nr, a, b, c, d) call(nr, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)

// True if `name` is one of the folders of `list`, or below one.
static int is_below(const char *list, const char *name) {
    while (list && *list) {
        size_t length = strcspn(list, ":");
        if (!strncmp(list, name, length) && (name[length] == '/' || name[length] == 0)) return 1;
        list += length + (list[length] == ':');
    }
    return 0;
}

// The path of an open file, without a final 0 if it fails.
static long path_of(int fd, char *out) {
    char name[32] = "/proc/self/fd/", digits[12];
    int at = sizeof digits - 1, end = strlen(name);
    digits[at] = 0;
    do digits[--at] = '0' + fd % 10;
    while ((fd /= 10));
    strcpy(name + end, digits + at);
    long length = CALL(SYS_readlink, name, out, LONGEST - 1, 0);
    out[length < 0 ? 0 : length] = 0;
    return length;
}

// The real path that a call on `name` would change. Its last part is followed too, if `follow`.
static long resolve(int folder, const char *name, int follow, char *out) {
    int opened = -1;
    long error = -ELOOP;
    strncpy(out, name, LONGEST - 1);
    if (strlen(name) >= LONGEST) return -ENAMETOOLONG;
    for (int links = 0; links < 40; links++) {
        strcpy(scratch, name);
        for (size_t end = strlen(scratch); end > 1 && scratch[end - 1] == '/'; end--) scratch[end - 1] = 0;
        char *slash = strrchr(scratch, '/');
        char *last = slash ? slash + 1 : scratch;
        int whole = !*last || !strcmp(last, ".") || !strcmp(last, "..");
        char base[LONGEST], part[LONGEST];
        strcpy(part, whole ? "" : last);
        if (!whole) *last = 0;
        const char *parent = *scratch ? scratch : ".";
        long found = CALL(SYS_openat, folder, parent, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
        if (opened >= 0) CALL(SYS_close, opened, 0, 0, 0);
        opened = -1;
        if (found < 0) return found;
        opened = folder = found;
        if ((error = path_of(opened, base)) < 0) break;
        strcpy(out, base);
        if (!whole) {
            if (strcmp(base, "/")) strcat(out, "/");
            strcat(out, part);
        }
        error = 0;
        long length = whole || !follow ? -1 : CALL(SYS_readlinkat, opened, part, link_text, LONGEST - 1);
        if (length < 0) break;
        link_text[length] = 0;
        name = link_text;
        error = -ELOOP;
    }
    if (opened >= 0) CALL(SYS_close, opened, 0, 0, 0);
    return error;
}

static void note(struct head head, const char *bytes) {
    if (trace < 0) return;
    head.path_bytes = strlen(path);
    head.other_bytes = strlen(other);
    if (!bytes) head.data_bytes = 0;
    struct iovec parts[] = {{&head, sizeof head}, {path, head.path_bytes}, {other, head.other_bytes},
                            {(void *)bytes, head.data_bytes}};
    CALL(SYS_writev, trace, parts, 4, 0);
}

// True if a full disk can fail the call.
static int needs_room(char kind, int is_new, int64_t offset, int fd) {
    struct stat found;
    if (kind == 't') return !CALL(SYS_fstat, fd, &found, 0, 0) && offset > found.st_size;
    return kind == 'o' ? is_new : strchr("wrlsmf", kind) != NULL;
}

struct request {
    long nr, args[6];
    struct head head;
    int fd, passes; // `passes`: neither counted nor traced
};

// Reads kind and paths of a call.
static long understand(struct request *r) {
    long *a = r->args;
    char kind = 0;
    int folder = AT_FDCWD, at = 0, follow = 0, by_fd = 0;
    r->fd = -1;
    switch (r->nr) {
    case SYS_creat: kind = 'o'; follow = 1; r->head.offset = O_WRONLY | O_CREAT | O_TRUNC; break;
    case SYS_open: kind = 'o'; r->head.offset = a[1]; break;
    case SYS_openat: kind = 'o'; folder = a[0]; at = 1; r->head.offset = a[2]; break;
    case SYS_openat2: kind = 'o'; folder = a[0]; at = 1; r->head.offset = ((struct open_how *)a[2])->flags; break;
    case SYS_write: case SYS_pwrite64: case SYS_writev: case SYS_pwritev: case SYS_pwritev2: kind = 'w'; by_fd = 1; break;
    case SYS_ftruncate: kind = 't'; by_fd = 1; r->head.offset = a[1]; break;
    case SYS_fsync: case SYS_fdatasync: kind = 'f'; by_fd = 1; break;
    case SYS_fchmod: case SYS_fchown: case SYS_fsetxattr: kind = 'x'; by_fd = 1; break;
    case SYS_fallocate: kind = '?'; by_fd = 1; break;
    case SYS_copy_file_range: kind = '?'; by_fd = 1; a[0] = a[2]; break;
    case SYS_sendfile: kind = '?'; by_fd = 1; break;
    case SYS_mmap: kind = '?'; by_fd = 1; break;
    case SYS_unlink: kind = 'u'; break;
    case SYS_rmdir: kind = 'd'; break;
    case SYS_unlinkat: kind = a[2] & AT_REMOVEDIR ? 'd' : 'u'; folder = a[0]; at = 1; break;
    case SYS_mkdir: kind = 'm'; break;
    case SYS_mkdirat: kind = 'm'; folder = a[0]; at = 1; break;
    case SYS_symlink: kind = 's'; at = 1; strncpy(other, (char *)a[0], LONGEST - 1); break;
    case SYS_symlinkat: kind = 's'; folder = a[1]; at = 2; strncpy(other, (char *)a[0], LONGEST - 1); break;
    case SYS_truncate: kind = '?'; follow = 1; break;
    case SYS_mknod: kind = '?'; break;
    case SYS_mknodat: kind = '?'; folder = a[0]; at = 1; break;
    case SYS_chmod: case SYS_chown: case SYS_setxattr: kind = 'x'; follow = 1; break;
    case SYS_lchown: case SYS_lsetxattr: kind = 'x'; break;
    case SYS_fchmodat: case SYS_fchownat: kind = 'x'; follow = 1; folder = a[0]; at = 1; break;
    case SYS_utimensat:
        kind = 'x'; follow = 1; folder = a[0]; at = 1; by_fd = !a[1];
        break;
    case SYS_rename: kind = 'r'; at = 1; resolve(AT_FDCWD, (char *)a[0], 0, other); break;
    case SYS_renameat: case SYS_renameat2: kind = 'r'; folder = a[2]; at = 3; resolve(a[0], (char *)a[1], 0, other); break;
    case SYS_link: kind = 'l'; at = 1; resolve(AT_FDCWD, (char *)a[0], 0, other); break;
    case SYS_linkat: kind = 'l'; folder = a[2]; at = 3; resolve(a[0], (char *)a[1], a[4] & AT_SYMLINK_FOLLOW, other); break;
    }
    r->head.kind = kind;
    if (by_fd) {
        r->fd = r->nr == SYS_mmap ? a[4] : a[0];
        if (path_of(r->fd, path) < 0 || path[0] != '/') r->passes = 1;
        return 0;
    }
    if (kind == 'o') {
        follow = !(r->head.offset & O_NOFOLLOW) && (r->head.offset & (O_CREAT | O_EXCL)) != (O_CREAT | O_EXCL);
        if (r->head.offset & O_PATH) r->passes = 1;
    }
    long error = resolve(folder, (char *)a[at], follow, path);
    struct stat found;
    int unnamed = (r->head.offset & O_TMPFILE) == O_TMPFILE;
    r->head.is_new = kind == 'o' && (unnamed || CALL(SYS_lstat, path, &found, 0, 0) == -ENOENT);
    return error;
}

static long make(struct request *r) {
    long *a = r->args;
    struct stat found;
    // these work on whole files without a write
    if (r->nr == SYS_copy_file_range || r->nr == SYS_fallocate) return -EOPNOTSUPP;
    if (r->nr == SYS_sendfile && !CALL(SYS_fstat, r->fd, &found, 0, 0) && S_ISREG(found.st_mode)) return -EINVAL;
    return call(r->nr, a[0], a[1], a[2], a[3], a[4], a[5]);
}

// Makes a write and notes its bytes; `most` limits them.
static long write_noted(struct request *r, size_t most) {
    long *a = r->args;
    struct iovec one = {(void *)a[1], a[2]}, *parts = &one;
    long num = 1, offset;
    if (r->nr == SYS_writev || r->nr == SYS_pwritev || r->nr == SYS_pwritev2) parts = (struct iovec *)a[1], num = a[2];
    struct stat found;
    if (CALL(SYS_fcntl, r->fd, F_GETFL, 0, 0) & O_APPEND) {
        offset = CALL(SYS_fstat, r->fd, &found, 0, 0) ? 0 : found.st_size;
    } else {
        offset = r->nr == SYS_write || r->nr == SYS_writev ? CALL(SYS_lseek, r->fd, 0, SEEK_CUR, 0) : a[3];
    }
    if (most < ~(size_t)0) a[2] = num = 1, a[1] = (long)parts[0].iov_base, a[2] = parts[0].iov_len / 2, r->nr = SYS_write;
    long result = make(r), left = result;
    for (long i = 0; i < num && left > 0; i++) {
        long here = (long)parts[i].iov_len < left ? (long)parts[i].iov_len : left;
        struct head head = r->head;
        head.result = head.data_bytes = here;
        head.offset = offset;
        note(head, parts[i].iov_base);
        offset += here, left -= here;
    }
    if (result <= 0) {
        r->head.result = result;
        note(r->head, NULL);
    }
    return result;
}

static long handle(struct request *r) {
    path[0] = other[0] = 0;
    long error = understand(r);
    if (r->passes) return make(r);
    char kind = r->head.kind;
    int is_sync = kind == 'f', has_other = kind == 'r' || kind == 'l';
    if (is_sync && no_sync) return 0;
    // what is written to an open file was checked when the file was opened
    int is_checked = r->fd < 0 || kind == 'x';
    if (jail && is_checked && !error && !(is_below(jail, path) && (!has_other || is_below(jail, other)))) {
        r->head.violation = 1;
        r->head.result = -EACCES;
        note(r->head, NULL);
        return -EACCES;
    }
    if (!is_below(roots, path) && !(has_other && is_below(roots, other))) return make(r);
    r->head.number = ++count;
    if ((long)count == kill_at) CALL(SYS_kill, CALL(SYS_getpid, 0, 0, 0, 0), SIGKILL, 0, 0);
    int hits = fail_at && ((long)count == fail_at || (stays && (long)count > fail_at));
    if (hits && fail_errno == ENOSPC) hits = needs_room(kind, r->head.is_new, r->head.offset, r->fd);
    if (hits) {
        r->head.injected = 1;
        size_t half = r->nr == SYS_write ? r->args[2] / 2 : 0;
        if (kind == 'w' && fail_errno == ENOSPC && (long)count == fail_at && half > 0) return write_noted(r, half);
        r->head.result = -fail_errno;
        note(r->head, NULL);
        return -fail_errno;
    }
    if (kind == 'w') return write_noted(r, ~(size_t)0);
    r->head.result = make(r);
    note(r->head, NULL);
    return r->head.result;
}

static void on_call(int signal, siginfo_t *info, void *context) {
    (void)signal;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    struct request request = {.nr = info->si_syscall,
                              .args = {registers[REG_RDI], registers[REG_RSI], registers[REG_RDX], registers[REG_R10],
                                       registers[REG_R8], registers[REG_R9]}};
    while (__sync_lock_test_and_set(&lock, 1)) CALL(SYS_sched_yield, 0, 0, 0, 0);
    long result = handle(&request);
    __sync_lock_release(&lock);
    registers[REG_RAX] = result;
}

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define RETURN(what) BPF_STMT(BPF_RET | BPF_K, what)
#define IS(nr) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 1), RETURN(SECCOMP_RET_TRAP)
// A call whose argument `arg` has one of `flags`.
#define IS_WITH(nr, arg, flags)                                                                                        \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 4), LOAD(args[arg]), BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, flags, 0, 1), \
        RETURN(SECCOMP_RET_TRAP), RETURN(SECCOMP_RET_ALLOW)

static void install_handler(void) {
    size_t size = stub_end - stub_code;
    void *page = mmap((void *)STUB, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (page != (void *)STUB) abort();
    memcpy(page, stub_code, size);
    mprotect(page, 4096, PROT_READ | PROT_EXEC);
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO};
    sigfillset(&action.sa_mask);
    sigaction(SIGSYS, &action, NULL);
}

static void install_filter(void) {
    uint64_t allowed = STUB + (stub_return - stub_code);
    struct sock_filter filter[] = {
        LOAD(arch), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0), RETURN(SECCOMP_RET_ALLOW),
        LOAD(instruction_pointer), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)allowed, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer) + 4),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(allowed >> 32), 0, 1), RETURN(SECCOMP_RET_ALLOW), LOAD(nr),
        IS_WITH(SYS_openat, 2, CHANGES), IS_WITH(SYS_open, 1, CHANGES), IS(SYS_openat2), IS(SYS_creat),
        IS(SYS_write), IS(SYS_pwrite64), IS(SYS_writev), IS(SYS_pwritev), IS(SYS_pwritev2),
        IS(SYS_ftruncate), IS(SYS_truncate), IS(SYS_fallocate), IS(SYS_fsync), IS(SYS_fdatasync),
        IS(SYS_rename), IS(SYS_renameat), IS(SYS_renameat2), IS(SYS_link), IS(SYS_linkat), IS(SYS_symlink), IS(SYS_symlinkat),
        IS(SYS_unlink), IS(SYS_unlinkat), IS(SYS_rmdir), IS(SYS_mkdir), IS(SYS_mkdirat), IS(SYS_mknod), IS(SYS_mknodat),
        IS(SYS_copy_file_range), IS(SYS_sendfile), IS(SYS_chmod), IS(SYS_fchmod), IS(SYS_fchmodat), IS(SYS_chown),
        IS(SYS_fchown), IS(SYS_lchown), IS(SYS_fchownat), IS(SYS_utimensat), IS(SYS_setxattr), IS(SYS_lsetxattr),
        IS(SYS_fsetxattr),
        // memory that is shared and can be written: a change of the file if there is one
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 6), LOAD(args[2]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_WRITE, 0, 4), LOAD(args[3]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_SHARED, 0, 2), BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_ANONYMOUS, 1, 0),
        RETURN(SECCOMP_RET_TRAP), RETURN(SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) abort();
}

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

__attribute__((constructor)) static void start(void) {
    roots = getenv("FAULT_ROOTS");
    jail = getenv("FAULT_JAIL");
    fail_at = number("FAULT_FAIL");
    kill_at = number("FAULT_KILL");
    stays = number("FAULT_STAYS");
    no_sync = number("FAULT_NO_SYNC");
    if (number("FAULT_ERRNO")) fail_errno = number("FAULT_ERRNO");
    // before any call that the filter of an executing process traps
    install_handler();
    if (getenv("FAULT_TRACE")) {
        int opened = CALL(SYS_open, getenv("FAULT_TRACE"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600, 0);
        // a number that does not change those of the program
        trace = CALL(SYS_fcntl, opened, F_DUPFD_CLOEXEC, 900, 0);
        CALL(SYS_close, opened, 0, 0, 0);
        if (trace < 0) abort();
    }
    install_filter();
}
