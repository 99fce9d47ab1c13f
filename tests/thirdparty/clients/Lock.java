// Lock hold|try PATH: java.nio's FileChannel.tryLock, as lock.py does.
import java.io.IOException;
import java.nio.channels.FileChannel;
import java.nio.channels.FileLock;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;

public class Lock {
    public static void main(String[] arguments) throws Exception {
        try {
            FileChannel channel = FileChannel.open(Path.of(arguments[1]), StandardOpenOption.CREATE, StandardOpenOption.WRITE);
            FileLock lock = channel.tryLock();
            if (lock == null) {
                System.err.println("held");
                System.exit(1);
            }
        } catch (IOException error) {
            System.err.println(error);
            System.exit(1);
        }
        if (arguments[0].equals("hold")) {
            System.out.println("held");
            Thread.sleep(Long.MAX_VALUE);
        }
        System.exit(0);
    }
}
