/* The executable of Baton.app: starts Python as its child, and stays until that ends.
 *
 * macOS asks for the local network, and remembers the answer, in the name of the bundle whose
 * executable a process descends from. So this program stays: a child whose parent is gone has no
 * such name any more. It also sends one datagram itself, since newer releases of macOS ask only
 * for the bundle's own process, never for a child.
 *
 * What it runs is in ../Resources/command, one item a line:
 *
 *   log PATH          where the child's output goes, below HOME if it begins with "~/"; a long
 *                     one is moved away first
 *   env NAME=VALUE    a variable of the child
 *   arg WORD          a word of its command line, the first one a path; below ../Resources if it
 *                     begins with "@resources/"
 *
 * The child finds the bundle's path in BATON_BUNDLE.
 *
 * Exit status: the child's own, 128 plus the signal that ended it, or 78 where the bundle is
 * broken. Nothing here is particular to macOS but how the program finds itself.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#endif

#ifndef BATON_ASKED
#define BATON_ASKED "224.0.0.251" /* where mDNS listens */
#endif
#ifndef BATON_ASKED_PORT
#define BATON_ASKED_PORT 5353
#endif

enum { BROKEN = 78, MOST_WORDS = 64, LONGEST_LINE = 8192, LONGEST_LOG = 4 << 20 };

static volatile sig_atomic_t child = 0;

static void pass_on(int number)
{
    if (child > 0)
        kill((pid_t)child, number);
}

static int broken(const char *what, const char *path)
{
    fprintf(stderr, "Baton.app: %s: %s: %s\n", what, path, strerror(errno));
    return BROKEN;
}

/* One query for producers. Nobody waits for an answer: that it was sent is what counts. */
static void ask_for_the_local_network(void)
{
    static const unsigned char query[] =
        "\0\0\0\0\0\1\0\0\0\0\0\0\6_baton\4_tcp\5local\0\0\14\0\1";
    struct sockaddr_in to = {0};
    int descriptor = socket(AF_INET, SOCK_DGRAM, 0);
    if (descriptor < 0)
        return;
    to.sin_family = AF_INET;
    to.sin_port = htons(BATON_ASKED_PORT);
    inet_pton(AF_INET, BATON_ASKED, &to.sin_addr);
    /* Refused at first, with "no route to host": that is when the question appears. */
    (void)sendto(descriptor, query, sizeof query - 1, 0, (struct sockaddr *)&to, sizeof to);
    close(descriptor);
}

/* The path of Contents, in which this executable is. */
static int find_contents(char *real)
{
    char own[PATH_MAX];
#ifdef __APPLE__
    uint32_t length = sizeof own;
    if (_NSGetExecutablePath(own, &length) != 0)
        return -1;
#else
    ssize_t length = readlink("/proc/self/exe", own, sizeof own - 1);
    if (length < 0)
        return -1;
    own[length] = '\0';
#endif
    if (realpath(own, real) == NULL)
        return -1;
    for (int level = 0; level < 2; level++) {
        char *slash = strrchr(real, '/');
        if (slash == NULL)
            return -1;
        *slash = '\0';
    }
    return 0;
}

/* A text whose beginning stands for a directory, with that directory; else the text. */
static char *placed(const char *text, const char *beginning, const char *directory)
{
    size_t length = strlen(beginning);
    char *made;
    if (directory == NULL || strncmp(text, beginning, length) != 0)
        return strdup(text);
    made = malloc(strlen(directory) + strlen(text) + 2);
    if (made != NULL)
        sprintf(made, "%s/%s", directory, text + length);
    return made;
}

static void write_to(const char *log)
{
    struct stat found;
    char older[PATH_MAX];
    int descriptor;
    if (log == NULL)
        return;
    if (snprintf(older, sizeof older, "%s", log) < (int)sizeof older && strrchr(older, '/')) {
        *strrchr(older, '/') = '\0';
        mkdir(older, 0700);
    }
    if (stat(log, &found) == 0 && found.st_size > LONGEST_LOG &&
        snprintf(older, sizeof older, "%s.1", log) < (int)sizeof older)
        rename(log, older);
    descriptor = open(log, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (descriptor < 0)
        return;
    dup2(descriptor, STDOUT_FILENO);
    dup2(descriptor, STDERR_FILENO);
    if (descriptor > STDERR_FILENO)
        close(descriptor);
}

int main(void)
{
    static char line[LONGEST_LINE];
    static const int passed[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
    char contents[PATH_MAX], resources[PATH_MAX + 16], path[PATH_MAX + 32];
    char *words[MOST_WORDS + 1] = {NULL};
    int count = 0, status = 0;
    sigset_t all, before;
    struct sigaction action;
    FILE *file;

    if (find_contents(contents) != 0)
        return broken("cannot find itself", "Contents/MacOS");
    snprintf(resources, sizeof resources, "%s/Resources", contents);
    snprintf(path, sizeof path, "%s/command", resources);
    file = fopen(path, "r");
    if (file == NULL)
        return broken("cannot read what to run", path);
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "log ", 4) == 0)
            write_to(placed(line + 4, "~/", getenv("HOME")));
        else if (strncmp(line, "env ", 4) == 0)
            putenv(strdup(line + 4));
        else if (strncmp(line, "arg ", 4) == 0 && count < MOST_WORDS)
            words[count++] = placed(line + 4, "@resources/", resources);
    }
    fclose(file);
    *strrchr(contents, '/') = '\0';
    setenv("BATON_BUNDLE", contents, 1);
    if (count == 0) {
        errno = EINVAL;
        return broken("nothing to run", path);
    }

    ask_for_the_local_network();

    memset(&action, 0, sizeof action);
    action.sa_handler = pass_on;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof passed / sizeof *passed; i++)
        sigaction(passed[i], &action, NULL);
    /* None is lost between the child's start and the moment at which it is known. */
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    child = fork();
    if (child == 0) {
        for (size_t i = 0; i < sizeof passed / sizeof *passed; i++)
            signal(passed[i], SIG_DFL);
        sigprocmask(SIG_SETMASK, &before, NULL);
        execv(words[0], words);
        _exit(broken("cannot run", words[0]));
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (child < 0)
        return broken("cannot start", words[0]);
    while (waitpid((pid_t)child, &status, 0) < 0)
        if (errno != EINTR)
            return broken("cannot wait for", words[0]);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
